"""The order of launches in a comparison: pairs in ABBA order, and the repeats of disturbed ones. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.compare.performance.launches import Launch, contamination

EXTRA_PAIRS = 2
"""At most so many pairs are repeated because of contamination."""


@dataclass(frozen=True)
class Slot:
    """One launch to make; ``pair`` is None for the pilot, ``replaces`` the contaminated pair that it repeats."""

    order: int
    pair: int | None
    arm: str
    replaces: int | None = None


def schedule(pairs: int, seed: int, arms: Sequence[str] = ("baseline", "candidate"), pilot: bool = True) -> list[Slot]:
    """Return the launches of a comparison in order: the pilot, then A B, B A, A B, ...

    A linear drift of the machine cancels over every two pairs. The starting arm is drawn from ``seed``. With three arms
    (scaling) a "pair" is a triple, and every second one runs backwards.

    Args:
        pairs: How many; at least 1.
        seed: Draws the order of the arms, and nothing else.
        arms: Their labels, all different.
        pilot: Whether a discarded launch of the starting arm comes first: it fills the caches and fixes the step count.
    """
    if pairs < 1 or len(set(arms)) != len(arms):
        raise ValueError(f"a comparison needs at least 1 pair and different arms, not {pairs} of {list(arms)}")
    forward = list(arms)
    # A generator of its own: to draw from the common one would change what is drawn after it.
    random.Random(seed).shuffle(forward)
    turns: list[tuple[int | None, str]] = [(None, forward[0])] if pilot else []
    turns += [(pair, arm) for pair in range(pairs) for arm in (forward[::-1] if pair % 2 else forward)]
    return [Slot(order, pair, arm) for order, (pair, arm) in enumerate(turns)]


def repeats(slots: Sequence[Slot], launches: Sequence[Launch]) -> list[Slot]:
    """Return the launches to make again: pairs with a contaminated or missing launch, at most 2 over the comparison.

    One that is too short to tell is not among them: it would be as short again.
    A repeated pair keeps the order of its arms, so that the balance of the schedule holds. Call it again after the
    repeats with both lists extended; it returns nothing when all is clean or the extra pairs are used up.
    """
    replaced = {slot.replaces for slot in slots if slot.replaces is not None}
    arms_of = _arms_by_pair(slots)
    # A launch that failed left no numbers, so that its pair counts fewer clean ones than it has arms.
    clean = Counter(launch.pair for launch in launches if not contamination(launch))
    # A repeat may be bad as well, and is then repeated itself until the extra pairs are used up.
    bad = [pair for pair, arms in arms_of.items() if pair not in replaced and clean[pair] < len(arms)]
    order = max((slot.order for slot in slots), default=-1) + 1
    again: list[Slot] = []
    for number, pair in enumerate(bad[: max(0, EXTRA_PAIRS - len(replaced))], start=max(arms_of, default=-1) + 1):
        again += [Slot(order + len(again) + i, number, arm, pair) for i, arm in enumerate(arms_of[pair])]
    return again


def _arms_by_pair(slots: Sequence[Slot]) -> dict[int, list[str]]:
    arms_of: dict[int, list[str]] = {}
    for slot in sorted(slots, key=lambda slot: slot.order):
        if slot.pair is not None:
            arms_of.setdefault(slot.pair, []).append(slot.arm)
    return arms_of

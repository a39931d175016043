"""How recorded things are compared: digests over ranks and against a reference, numbers by a relative error.

Everything here is written so that NaN, None, a missing name and an empty list never agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any, TypeVar

from harness.compare.correctness.check import Incomplete, Mismatch
from harness.compare.correctness.evidence import Digests, Evidence, StepEvidence

T = TypeVar("T")
S = TypeVar("S", bound=Sized)

# --- digests ---------------------------------------------------------------------------------------------------------


def against(
    references: Sequence[Digests], ranks: Sequence[Digests], order: Iterable[str], stage: str, step: int, other: str
) -> Iterator[Mismatch]:
    """Yield, tensor by tensor, the first rank whose bits are not its reference's.

    Args:
        references: One for each rank.
        order: In which tensors are looked at; names that only one side has are wrong wherever they stand.
        other: Whose the references are, such as ``the replay's``.
    """
    # Said here, because the strict zip below would call it evidence that cannot be read, without a word on the stage.
    if len(references) != len(ranks):
        raise Incomplete(f"{stage}: {len(ranks)} ranks against {len(references)}")
    # Names of both sides: one that only a rank has, or only its reference, would else never be looked at. A dict keeps the
    # causal order, which a set would lose.
    for name in dict.fromkeys(chain(order, *references, *ranks)):
        pairs = [(mine.get(name), theirs.get(name)) for mine, theirs in zip(ranks, references, strict=True)]
        wrong = [rank for rank, pair in enumerate(pairs) if not same(*pair)]
        if wrong:
            yield Mismatch(_difference(pairs, wrong, other), stage, step, wrong[0], name)


def _difference(pairs: Sequence[tuple[str | None, str | None]], wrong: Sequence[int], other: str) -> str:
    mine, theirs = pairs[wrong[0]]
    if not mine:
        return f"rank {wrong[0]} has no such tensor"
    if not theirs:
        return f"only rank {wrong[0]} has this tensor, and {other} part lacks it"
    who = "all ranks" if len(wrong) == len(pairs) else f"ranks {', '.join(map(str, wrong))}"
    return f"the bits differ from {other}" + (f" on {who}" if len(wrong) > 1 else "")


def among(ranks: Sequence[Digests], order: Iterable[str], stage: str, step: int) -> Iterator[Mismatch]:
    """Yield, tensor by tensor, the rank whose bits are not the other ranks'."""
    for name in order:
        # None becomes empty, so that a tensor which all ranks lack alike is found below and not taken for agreement.
        values = [each.get(name) or "" for each in ranks]
        odd = odd_rank(values)
        if "" in values:
            lacking = values.index("")
            yield Mismatch(f"rank {lacking} has no such tensor", stage, step, lacking, name)
        elif odd is not None:
            yield Mismatch("the bits differ from the other ranks'", stage, step, odd, name)


def odd_rank(values: Sequence[str]) -> int | None:
    """Return the first rank that is not with the majority; of equal halves, rank 0's is taken for it. None if all agree."""
    # Values that are equally common stay in the order in which they were first met, and rank 0 comes first.
    usual = Counter(values).most_common(1)[0][0]
    return next((rank for rank, value in enumerate(values) if value != usual), None)


def same(mine: object, other: object) -> bool:
    """Return True for two equal digests; what is empty or not there is equal to nothing."""
    return isinstance(mine, str) and bool(mine) and mine == other


def without(state: Digests, buffers: Digests) -> Digests:
    """Return a state's parameters and optimizer state: BatchNorm's buffers are each rank's own between two forwards."""
    return {name: digest for name, digest in state.items() if name not in buffers}


def tensors(*states: Mapping[str, Any]) -> list[str]:
    """Return all names, in the model's order; it is an error that there are none."""
    return some(list(dict.fromkeys(chain.from_iterable(states))), "any tensor")


def backwards(*gradients: Mapping[str, Any]) -> list[str]:
    """Return all names in the order in which backward comes to them: the model's, reversed."""
    return tensors(*gradients)[::-1]


# --- what must be there ----------------------------------------------------------------------------------------------


def some(values: S, what: str) -> S:
    """Return ``values``; Incomplete where there are none."""
    if not values:
        raise Incomplete(f"the evidence does not hold {what}")
    return values


def per_rank(evidence: Evidence, values: Sequence[T], what: str) -> Sequence[T]:
    """Return ``values``; Incomplete where they are not as many as the ranks."""
    if len(values) != evidence["nprocs"] or not values:
        raise Incomplete(f"the evidence holds {what} of {plural(len(values), 'rank')}, not of {evidence['nprocs']}")
    return values


def steps_of(evidence: Evidence) -> list[StepEvidence]:
    """Return the checked steps; Incomplete where there are none, or not in order."""
    steps = some(evidence["steps"], "any step")
    numbers = [step["step"] for step in steps]
    # What is said of a step and the one before it rests on this order; the set refuses a step that stands there twice.
    if not all(isinstance(number, int) for number in numbers) or numbers != sorted(set(numbers)):
        raise Incomplete(f"steps {numbers} are not in order")
    return steps


def replayed(evidence: Evidence, *keys: str) -> list[StepEvidence]:
    """Return the steps of which all these replays exist; Incomplete where one does not, and no reason is given."""
    found = []
    for step in steps_of(evidence):
        there = [step.get(key) is not None for key in keys]
        if all(there):
            found.append(step)
        # A reason covers a step without any replay; one of which half is there was cut short, whatever reason it gives.
        elif any(there) or not step["not_replayed"]:
            raise Incomplete(f"step {step['step']} was not replayed, and the evidence does not say why")
    return found


# --- numbers ---------------------------------------------------------------------------------------------------------


def relative(a: float, b: float) -> float:
    """Return the relative difference of two numbers; NaN where either is not finite."""
    return by_scale(abs(a - b), max(abs(a), abs(b)))


def by_scale(difference: float, scale: float) -> float:
    """Return ``difference / scale``: 0 where nothing differs from nothing, NaN where either is NaN."""
    # Asked first: 0 / 0 would come to NaN, which counts as wrong, and two zeros are equal.
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 else math.nan


def finite(value: object) -> bool:
    """Return True for a number that is neither NaN nor infinite."""
    return isinstance(value, int | float) and math.isfinite(value)


def mean(sums: Iterable[Sequence[float]]) -> float:
    """Return the mean that (sum, count) pairs come to; NaN where nothing was counted."""
    pairs = list(sums)
    # fsum rounds once, at the end: R9's bound is for the error of the report, and leaves no room for one of this sum.
    count = math.fsum(count for _, count in pairs)
    return math.fsum(total for total, _ in pairs) / count if count > 0 else math.nan


# --- words -----------------------------------------------------------------------------------------------------------


def plural(count: object, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def at(steps: Iterable[Mapping[str, Any]]) -> str:
    """Return ``step 0``, ``steps 0, 1, 2``."""
    numbers = [str(step["step"]) for step in steps]
    return f"step{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"

"""What pairs of launches let one claim: pure arithmetic on their log ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.compare.performance import stats
from harness.compare.performance.launches import Launch, Quantity, adjustable, doubts, reasons, seconds
from harness.errors import NotComparable

Claim = Literal["faster", "slower", "equivalent", "inconclusive"]


@dataclass(frozen=True)
class PairEvidence:
    """What a comparison rests on: clean pairs, their log ratios (candidate over baseline), and what was left out."""

    quantity: Quantity
    margin: float
    clean: list[tuple[Launch, Launch]]
    dirty: dict[int, tuple[str, ...]]
    untold: dict[int, tuple[str, ...]]
    alone: int
    adjusted: bool
    logs: list[float]
    raw_logs: list[float]


def pair_evidence(arms: Sequence[Mapping[int, Launch]], quantity: Quantity, margin: float) -> PairEvidence:
    """Return what a comparison of two arms rests on."""
    pairs = {pair: (arms[0][pair], arms[1][pair]) for pair in sorted(arms[0].keys() & arms[1].keys())}
    dirty = {pair: causes for pair, both in pairs.items() if (causes := reasons(both))}
    # Apart from the disturbed ones, as something else is to be done about them: more steps, not a quieter machine.
    vague = {pair: why for pair, both in pairs.items() if pair not in dirty and (why := doubts(both, quantity))}
    clean = [both for pair, both in pairs.items() if pair not in dirty | vague]
    # Subtracting in one arm alone, or in some pairs, would make a difference of its own.
    adjust = quantity == "throughput" and all(adjustable(launch) for both in clean for launch in both)
    logs, raw_logs = pair_logs(clean, quantity, adjust), pair_logs(clean, quantity, False)
    return PairEvidence(quantity, margin, clean, dirty, vague, len(arms[0].keys() ^ arms[1].keys()), adjust, logs, raw_logs)


def claim(logs: Sequence[float], margin: float) -> Claim:
    """Return the verdict that log ratios (candidate over baseline, of times) support by themselves."""
    if len(logs) < 2:
        return "inconclusive"
    # Asked before the interval: with many pairs a difference of 1 % is sure, and still too small to matter.
    if stats.equivalent(logs, margin):
        return "equivalent"
    interval = stats.location_interval(logs)
    if interval.contains(0.0):
        return "inconclusive"
    return "faster" if interval.high < 0 else "slower"


def contradict(logs: Sequence[float], raw_logs: Sequence[float], margin: float) -> bool:
    """Return whether raw times speak against what adjusted times say.

    They do with another claim of their own, or where their interval leaves out the adjusted ratio. Raw times that are
    merely too noisy for a claim do not: the noise is what the adjustment is for.
    """
    claimed, raw = claim(logs, margin), claim(raw_logs, margin)
    if claimed in ("inconclusive", raw):
        return False
    adjusted = math.log(stats.paired_ratio(logs).ratio)
    return raw != "inconclusive" or not stats.location_interval(raw_logs).contains(adjusted)


def agreed(logs: Sequence[float], raw_logs: Sequence[float], margin: float) -> Claim:
    """Return what adjusted times claim and raw times do not speak against."""
    return "inconclusive" if contradict(logs, raw_logs, margin) else claim(logs, margin)


def pair_logs(pairs: Sequence[Sequence[Launch]], quantity: Quantity, adjusted: bool) -> list[float]:
    """Return ln(T_candidate / T_baseline) of each pair.

    Raises:
        NotComparable: A time is none.
    """
    # In logarithms, because ln(B / A) = -ln(A / B): which arm is called the baseline must not change what is claimed.
    columns = [[seconds(launch, quantity, adjusted) for launch in arm] for arm in zip(*pairs, strict=True)]
    try:
        return stats.log_ratios(*columns) if columns else []
    except ValueError as error:
        raise NotComparable(f"{pairs[0][0].arm} and {pairs[0][1].arm} cannot be compared: {error}.") from error


def pairs_needed(evidence: PairEvidence) -> int | None:
    """Return the forecast of :func:`stats.pairs_to_settle`.

    From one pair, how launches vary is guessed from how steps vary within them; start-up has nothing to guess from.
    """
    if len(evidence.logs) > 1:
        return stats.pairs_to_settle(stats.effective_sd(evidence.logs), evidence.margin)
    if not evidence.clean or evidence.quantity == "start":
        return None
    # sd(T) / T is about sd(ln T), and the variances of two independent arms add.
    shares = [stats.spread(launch.step_s) / stats.median(launch.step_s) for launch in evidence.clean[0]]
    return stats.pairs_to_settle(math.hypot(*shares), evidence.margin) if all(shares) else None

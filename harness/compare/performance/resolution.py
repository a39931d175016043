"""What this machine can tell apart: a launcher compared with itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.compare.performance import stats
from harness.compare.performance.claim import pair_logs
from harness.compare.performance.distributions import student_t_quantile
from harness.compare.performance.launches import (
    Launch,
    Quantity,
    adjustable,
    contamination,
    doubts,
    reasons,
    require_comparable,
    untold,
)
from harness.compare.performance.words import times


@dataclass(frozen=True)
class Resolution:
    """What a launcher compared with itself shows about the machine.

    Attributes:
        quantity: ``throughput`` or ``start``.
        ratio: The smallest ratio that as many pairs find with 80 % probability (95 % level).
        apparent: The ratio found between equals; its interval should hold 1.
        biased: True where it does not, so that ratios up to the apparent one mean nothing.
    """

    quantity: Quantity
    ratio: float
    apparent: stats.PairedRatio
    biased: bool
    sentence: str


def resolution(launches: Sequence[Launch], quantity: Quantity = "throughput", power: float = 0.8) -> Resolution | None:
    """Return the smallest ratio that this machine can tell apart, from an A/A comparison; None below 2 clean pairs.

    Launches are paired by order, and every second pair is turned round, as ABBA order does. A ratio as far from 1 as
    the half-width h of the 95 % interval is found by half of all comparisons; ``power`` asks for
    h (1 + t_power / t_0.975).
    """
    clean = _clean_pairs_of_one(launches, quantity)
    if len(clean) < 2:
        return None
    # All or none, as in pair_evidence: launches with and without the subtraction would differ by it.
    logs = pair_logs(clean, quantity, all(adjustable(launch) for both in clean for launch in both))
    inner, df = stats.location_interval(logs), len(logs) - 1
    share = student_t_quantile(power, df) / student_t_quantile(0.975, df)
    smallest = math.exp((inner.high - inner.low) / 2 * (1 + share))
    return _resolution(quantity, smallest, stats.paired_ratio(logs), not inner.contains(0.0))


def _clean_pairs_of_one(launches: Sequence[Launch], quantity: Quantity) -> list[tuple[Launch, Launch]]:
    counted = sorted((launch for launch in launches if launch.pair is not None), key=lambda launch: launch.order)
    require_comparable(counted)
    # A last launch without a partner is left aside.
    pairs = zip(counted[::2], counted[1::2], strict=False)
    turned = [(b, a) if i % 2 else (a, b) for i, (a, b) in enumerate(pairs)]
    return [both for both in turned if not (reasons(both) or doubts(both, quantity))]


def unresolved(launches: Sequence[Launch]) -> str:
    """Return why :func:`resolution` says nothing of the launches' steps; empty where it does."""
    clean = len(_clean_pairs_of_one(launches, "throughput")) if launches else 0
    if clean >= 2:
        return ""
    # In the order of what a reader can do about it: a quieter machine, then more steps, then more pairs.
    disturbed = [why for launch in launches if (why := contamination(launch))]
    if disturbed:
        were = "was" if len(disturbed) == 1 else "were"
        return f"nothing can be said, {len(disturbed)} of {len(launches)} launches {were} disturbed ({disturbed[0][0]})"
    doubtful = [reason for launch in launches if (reason := untold(launch))]
    if doubtful:
        return f"nothing can be said of steps, {len(doubtful)} of {len(launches)} launches cannot tell ({doubtful[0]})"
    return f"nothing can be said, that needs 2 clean pairs, and there {'is 1' if clean == 1 else 'is none'}"


def _resolution(quantity: Quantity, smallest: float, apparent: stats.PairedRatio, biased: bool) -> Resolution:
    sentence = f"this machine tells ratios from {times(smallest)} apart with {apparent.pairs} pairs"
    if biased:
        sentence += f"; but a launcher differs from itself by {times(apparent.ratio)}: smaller ratios mean nothing"
    return Resolution(quantity, smallest, apparent, biased, sentence)

"""Which of two ways of running is faster, and how sure that is: pure functions from numbers of launches to a verdict.

The unit is one launch: its steps become one number, pairs of launches become one ratio. Times are compared with the
run-delay subtracted (how long the kernel let a runnable rank wait, second field of ``/proc/self/schedstat``), and
beside that as measured; a claim that the measured times contradict is not made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.compare.correctness.agreement import plural
from harness.compare.performance import stats
from harness.compare.performance.launches import (
    Launch,
    Quantity,
    adjustable,
    contamination,
    counted,
    doubts,
    reasons,
    require_comparable,
    seconds,
    typical,
    untold,
)
from harness.errors import NotComparable

Claim = Literal["faster", "slower", "equivalent", "inconclusive"]

MARGINS: Mapping[Quantity, float] = {"throughput": 0.10, "start": 0.20}
"""The smallest difference that matters, unless told otherwise."""


@dataclass(frozen=True)
class PerformanceVerdict:
    """What can be said about a candidate against a baseline.

    Attributes:
        verdict: ``equivalent`` (the 90 % interval of the ratio lies within the margin; this comes first, so a
            difference too small to matter is never called faster), ``faster`` or ``slower`` (its 95 % interval leaves
            out 1), or ``inconclusive``. There is no "no difference".
        quantity: ``throughput`` or ``start``.
        margin: The smallest difference that matters, as a share.
        adjusted: Time of the candidate over time of the baseline, with run-delay subtracted; None without a pair.
        raw: The same as measured.
        pairs: Pairs that the ratio rests on.
        contaminated: Numbers of the pairs that were left out as disturbed, with the reasons.
        untold: The same for those of which nobody can tell whether they were.
        needed_pairs: How many pairs in all would settle the margin at the width seen; None where nothing can be
            forecast. A stop rule may look at this, as it does not depend on the effect; what that costs is said at
            :func:`stats.pairs_to_settle`.
        sentences: The verdict as text, then what the reader must know beside it.
    """

    verdict: Claim
    quantity: Quantity
    margin: float
    adjusted: stats.PairedRatio | None
    raw: stats.PairedRatio | None
    pairs: int
    contaminated: Mapping[int, tuple[str, ...]]
    untold: Mapping[int, tuple[str, ...]]
    needed_pairs: int | None
    sentences: tuple[str, ...]

    @property
    def left_out(self) -> int:
        """How many pairs were left out."""
        return len(self.contaminated) + len(self.untold)

    @property
    def ratio(self) -> float | None:
        """Time of the candidate over time of the baseline; below 1, the candidate is faster."""
        return self.adjusted.ratio if self.adjusted else None

    @property
    def interval(self) -> stats.Interval | None:
        """The 95 % interval of the ratio."""
        return self.adjusted.interval if self.adjusted else None

    @property
    def label(self) -> str:
        """The verdict in the words of a table's cell, such as ``1.82x faster``."""
        if self.verdict == "equivalent":
            return _within(self.margin)
        if self.untold and self.left_out == len(self.untold) and not self.pairs:
            return "cannot tell"
        if self.verdict == "inconclusive" or self.adjusted is None:
            return "inconclusive"
        return f"{_times(_as_said(self.adjusted.ratio, self.verdict))}x {self.verdict}"


def compare(
    baseline: Sequence[Launch],
    candidate: Sequence[Launch],
    quantity: Quantity = "throughput",
    margin: float | None = None,
    varied: Iterable[str] = (),
) -> PerformanceVerdict:
    """Return what the launches of two arms say about each other; pilots are left aside.

    Args:
        baseline: Its launches, in any order; they are paired with the candidate's by ``pair``.
        candidate: Its launches.
        quantity: What is compared.
        margin: The smallest difference that matters, as a share; by default that of :data:`MARGINS`.
        varied: Names of :data:`CONDITIONS` that may differ because they are what is compared.

    Raises:
        NotComparable: An arm has no launch, or the conditions differ.
    """
    arms = [counted(baseline, "the baseline"), counted(candidate, "the candidate")]
    require_comparable([*arms[0].values(), *arms[1].values()], varied)
    found = _evidence(arms, quantity, MARGINS[quantity] if margin is None else margin)
    verdict, needed = _agreed(found.logs, found.raw_logs, found.margin), _needed(found)
    return PerformanceVerdict(
        verdict=verdict,
        quantity=quantity,
        margin=found.margin,
        adjusted=stats.paired_ratio(found.logs) if found.logs else None,
        raw=stats.paired_ratio(found.raw_logs) if found.raw_logs else None,
        pairs=len(found.clean),
        contaminated=found.dirty,
        untold=found.untold,
        needed_pairs=needed,
        sentences=(_headline(verdict, found, needed), *_notes(found)),
    )


@dataclass(frozen=True)
class _Evidence:
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


def _evidence(arms: Sequence[Mapping[int, Launch]], quantity: Quantity, margin: float) -> _Evidence:
    pairs = {pair: (arms[0][pair], arms[1][pair]) for pair in sorted(arms[0].keys() & arms[1].keys())}
    dirty = {pair: found for pair, both in pairs.items() if (found := reasons(both))}
    vague = {pair: why for pair, both in pairs.items() if pair not in dirty and (why := doubts(both, quantity))}
    clean = [both for pair, both in pairs.items() if pair not in dirty | vague]
    # Subtracting in one arm alone, or in some pairs, would make a difference of its own.
    adjust = quantity == "throughput" and all(adjustable(launch) for both in clean for launch in both)
    logs, raw_logs = _logs(clean, quantity, adjust), _logs(clean, quantity, False)
    return _Evidence(quantity, margin, clean, dirty, vague, len(arms[0].keys() ^ arms[1].keys()), adjust, logs, raw_logs)


def claim(logs: Sequence[float], margin: float) -> Claim:
    """Return the verdict that log ratios (candidate over baseline, of times) support by themselves."""
    if len(logs) < 2:
        return "inconclusive"
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
    ours, theirs = claim(logs, margin), claim(raw_logs, margin)
    if ours in ("inconclusive", theirs):
        return False
    adjusted = math.log(stats.paired_ratio(logs).ratio)
    return theirs != "inconclusive" or not stats.location_interval(raw_logs).contains(adjusted)


def _agreed(logs: Sequence[float], raw_logs: Sequence[float], margin: float) -> Claim:
    return "inconclusive" if contradict(logs, raw_logs, margin) else claim(logs, margin)


def _logs(pairs: Sequence[Sequence[Launch]], quantity: Quantity, adjusted: bool) -> list[float]:
    """Return ln(T_candidate / T_baseline) of each pair.

    Raises:
        NotComparable: A time is none.
    """
    columns = [[seconds(launch, quantity, adjusted) for launch in arm] for arm in zip(*pairs, strict=True)]
    try:
        return stats.log_ratios(*columns) if columns else []
    except ValueError as error:
        raise NotComparable(f"{pairs[0][0].arm} and {pairs[0][1].arm} cannot be compared: {error}.") from error


def _needed(found: _Evidence) -> int | None:
    """Return the forecast of :func:`stats.pairs_to_settle`.

    From one pair, how launches vary is guessed from how steps vary within them; start-up has nothing to guess from.
    """
    if len(found.logs) > 1:
        return stats.pairs_to_settle(stats.effective_sd(found.logs), found.margin)
    if not found.clean or found.quantity == "start":
        return None
    shares = [stats.spread(launch.step_s) / stats.median(launch.step_s) for launch in found.clean[0]]
    return stats.pairs_to_settle(math.hypot(*shares), found.margin) if all(shares) else None


# The verdict as text


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}"


def _within(margin: float) -> str:
    return f"equivalent +-{_percent(margin)}%"


def _as_said(ratio: float, verdict: Claim) -> float:
    """Return the factor that stands before "faster": baseline over candidate; else candidate over baseline."""
    return 1 / ratio if verdict == "faster" else ratio


def _interval(logs: Sequence[float], verdict: Claim) -> str:
    interval = stats.paired_ratio(logs).interval
    if interval is None:
        return plural(len(logs), "pair")
    low, high = sorted((_as_said(interval.low, verdict), _as_said(interval.high, verdict)))
    of = "" if verdict in ("faster", "slower") else "of the time ratio "
    return f"95 % interval {of}{_times(low)} to {_times(high)}, {plural(len(logs), 'pair')}"


def _said(verdict: Claim, logs: Sequence[float], margin: float) -> str:
    factor = _as_said(stats.paired_ratio(logs).ratio, verdict)
    words = {"equivalent": _within(margin), "inconclusive": "inconclusive"}
    return f"{words.get(verdict) or f'{_times(factor)}x {verdict}'} ({_interval(logs, verdict)})"


def _headline(verdict: Claim, found: _Evidence, needed: int | None) -> str:
    logs, margin = found.logs, found.margin
    if verdict != "inconclusive":
        return _said(verdict, logs, margin)
    if not (logs or found.dirty or found.untold):
        return "inconclusive: no launch of one arm has a partner in the other"
    if not logs:
        return f"inconclusive: no clean pair ({_left_out(found)})"
    if len(logs) == 1:
        guess = f"; if launches vary as much as steps do, {_settle(needed, 0, margin)}" if needed else ""
        return f"inconclusive: {_only_one(found)} claims nothing beyond its own spread{guess}"
    if contradict(logs, found.raw_logs, margin):
        ours, theirs = (_said(claim(of, margin), of, margin) for of in (logs, found.raw_logs))
        return f"inconclusive: without run-delay {ours}, but as measured {theirs}"
    return f"inconclusive: {_settle(needed, len(logs), margin)} ({_interval(logs, verdict)})"


def _left_out(found: _Evidence) -> str:
    disturbed = [f"{plural(len(found.dirty), 'pair')} disturbed"] if found.dirty else []
    vague = [why[0] for why in found.untold.values()]
    return ", ".join([*disturbed, *vague[:1]])


def _only_one(found: _Evidence) -> str:
    others = len(found.dirty) + len(found.untold) + found.alone
    return f"1 of {others + 1} pairs was clean, and one pair" if others else "one launch"


def _settle(needed: int | None, used: int, margin: float) -> str:
    if needed is None:
        return f"more than {stats.MOST_PAIRS} pairs would be needed to settle {_percent(margin)} %"
    # From 6 pairs on both intervals move in steps, so that what was used can be enough on paper: then 1 more.
    more = max(1, needed - used)
    return f"{more} {'more ' if used else ''}{'pair' if more == 1 else 'pairs'} would settle {_percent(margin)} %"


def _notes(found: _Evidence) -> list[str]:
    notes = [f"pair {pair} is left out as disturbed: {', '.join(why)}." for pair, why in found.dirty.items()]
    notes += [f"pair {pair} is left out, as nobody can tell: {', '.join(why)}." for pair, why in found.untold.items()]
    if found.alone:
        notes.append(f"left out, as the other arm's launch is missing: {found.alone}.")
    if len(found.clean) == 1:
        notes.append(_own_spreads(found.clean[0], found.quantity))
    if found.quantity == "throughput" and found.clean:
        notes.append(_on_adjustment(found))
    return notes


def _own_spreads(both: Sequence[Launch], quantity: Quantity) -> str:
    parts = []
    for launch in both:
        centre, around = typical([launch], quantity)
        scale, unit = (1.0, "s") if centre >= 1 else (1000.0, "ms")
        width = "" if math.isnan(around) else f" +- {around * scale:.2f}"
        parts.append(f"{launch.arm} {centre * scale:.2f}{width} {unit}")
    return " against ".join(reversed(parts)) + "."


def _on_adjustment(found: _Evidence) -> str:
    if found.adjusted:
        raw = stats.paired_ratio(found.raw_logs).ratio
        return f"as measured, run-delay included: time ratio {_times(raw)} ({_interval(found.raw_logs, 'slower')})."
    launches = [launch for both in found.clean for launch in both]
    if any(launch.delay_share is None for launch in launches):
        return "run-delay was not recorded in every launch: times are as measured."
    own = next(launch for launch in launches if not adjustable(launch))
    if own.quiet:
        why = f"had the cores to itself (others used {own.others:.2f} of them)"
    else:
        workers = f" and {plural(own.workers, 'data worker')}" if own.workers else ""
        asked = f"{plural(own.nprocs, 'rank')} with {plural(max(1, own.threads), 'thread')}{workers} each"
        why = f"runs {asked} on {plural(own.cores or 0, 'core')}"
    return f"{own.arm} {why}: its run-delay is its own, none is subtracted."


# What this machine can tell apart


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
    logs = _logs(clean, quantity, all(adjustable(launch) for both in clean for launch in both))
    inner, df = stats.location_interval(logs), len(logs) - 1
    share = stats.student_t_quantile(power, df) / stats.student_t_quantile(0.975, df)
    smallest = math.exp((inner.high - inner.low) / 2 * (1 + share))
    return _resolution(quantity, smallest, stats.paired_ratio(logs), not inner.contains(0.0))


def _clean_pairs_of_one(launches: Sequence[Launch], quantity: Quantity) -> list[tuple[Launch, Launch]]:
    counted = sorted((launch for launch in launches if launch.pair is not None), key=lambda launch: launch.order)
    require_comparable(counted)
    pairs = zip(counted[::2], counted[1::2], strict=False)
    turned = [(b, a) if i % 2 else (a, b) for i, (a, b) in enumerate(pairs)]
    return [both for both in turned if not (reasons(both) or doubts(both, quantity))]


def unresolved(launches: Sequence[Launch]) -> str:
    """Return why :func:`resolution` says nothing of the launches' steps; empty where it does."""
    clean = len(_clean_pairs_of_one(launches, "throughput")) if launches else 0
    if clean >= 2:
        return ""
    disturbed = [why for launch in launches if (why := contamination(launch))]
    if disturbed:
        were = "was" if len(disturbed) == 1 else "were"
        return f"nothing can be said, {len(disturbed)} of {len(launches)} launches {were} disturbed ({disturbed[0][0]})"
    doubtful = [said for launch in launches if (said := untold(launch))]
    if doubtful:
        return f"nothing can be said of steps, {len(doubtful)} of {len(launches)} launches cannot tell ({doubtful[0]})"
    return f"nothing can be said, that needs 2 clean pairs, and there {'is 1' if clean == 1 else 'is none'}"


def _resolution(quantity: Quantity, smallest: float, apparent: stats.PairedRatio, biased: bool) -> Resolution:
    sentence = f"this machine tells ratios from {_times(smallest)} apart with {apparent.pairs} pairs"
    if biased:
        sentence += f"; but a launcher differs from itself by {_times(apparent.ratio)}: smaller ratios mean nothing"
    return Resolution(quantity, smallest, apparent, biased, sentence)

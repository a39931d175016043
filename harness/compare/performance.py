"""Which of two ways of running is faster, and how sure that is: pure functions from numbers of launches to a verdict.

The unit is one launch: its steps become one number, pairs of launches become one ratio. Times are compared with the
run-delay subtracted (how long the kernel let a runnable rank wait, second field of ``/proc/self/schedstat``), and
beside that as measured; a claim that the measured times contradict is not made.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness import stats
from harness.errors import NotComparable

Quantity = Literal["throughput", "start"]
Claim = Literal["faster", "slower", "equivalent", "inconclusive"]
Owner = Literal["launcher", "framework"]

MARGINS: Mapping[Quantity, float] = {"throughput": 0.10, "start": 0.20}
"""The smallest difference that matters, unless told otherwise."""

RUN_DELAY_LIMIT = 0.05
CPU_PRESSURE_LIMIT = 0.10
SWITCHES_PER_STEP_LIMIT = 1.0
"""Involuntary context switches per step: stands in for run-delay where the kernel does not count it. Not calibrated."""

EXTRA_PAIRS = 2
"""At most so many pairs are repeated because of contamination."""


@dataclass(frozen=True)
class Launch:
    """One launch of one arm, as plain numbers.

    Attributes:
        arm: Label of what is compared, such as ``job 0``.
        order: Position among all launches of the comparison, from 0.
        pair: Number of its pair; None for the pilot, which is not counted.
        start_s: From the call to the end of the first step on all ranks.
        step_s: For each measured step (warm-up left out) the slowest rank's time.
        samples_per_step: Over all ranks: the global batch size.
        threads: Per rank.
        machine: Digest of cores, CPU, memory and versions.
        cores: That the launch may use; None where unknown.
        wall_s: Length of the measured window.
        run_delay_s: In that window, of the rank that waited most; None where the kernel does not count it.
        step_delay_s: The same for each measured step, of the step's slowest rank; empty where not recorded.
        cpu_pressure: Share of the window in which a runnable task waited (``/proc/pressure/cpu``); None where unknown.
        throttled: How often the control group held a rank back in the window.
        major_faults: Page faults in the window that had to read a disk.
        involuntary_switches: In the window, per rank; used where ``run_delay_s`` is None.
        phases: Seconds of each phase of start and end, the slowest rank's.
    """

    arm: str
    order: int
    pair: int | None
    start_s: float
    step_s: tuple[float, ...]
    samples_per_step: int
    nprocs: int
    threads: int
    machine: str
    cores: int | None = None
    wall_s: float = 0.0
    run_delay_s: float | None = None
    step_delay_s: tuple[float, ...] = ()
    cpu_pressure: float | None = None
    throttled: int = 0
    major_faults: int = 0
    involuntary_switches: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def oversubscribed(self) -> bool:
        """True where there are more ranks than cores."""
        return self.cores is not None and self.nprocs > self.cores

    @property
    def crowded(self) -> bool:
        """True where the launch's own threads outnumber the cores, so that they wait for each other."""
        return self.cores is not None and self.nprocs * max(1, self.threads) > self.cores

    @property
    def delay_share(self) -> float | None:
        """Run-delay as a share of the measured window; None where it is unknown."""
        if self.run_delay_s is None or self.wall_s <= 0:
            return None
        return self.run_delay_s / self.wall_s


# From a launch to one number


def raw_step_s(launch: Launch) -> float:
    """Return the median over the measured steps of the slowest rank's time, in seconds.

    Raises:
        NotComparable: No step was measured.
    """
    if not launch.step_s:
        raise NotComparable(f"{launch.arm} has no measured step: set steps above the number of warm-up steps.")
    return stats.median(launch.step_s)


def launch_step_s(launch: Launch) -> float:
    """Return the same with the run-delay subtracted; as measured, where no run-delay of other processes is known.

    Step by step where each step's delay is recorded; else by the window's share of it, which takes slightly too much
    off a median where the delay fell into few steps. A launch whose own threads outnumber the cores is left as it is:
    its ranks wait for each other, which is part of its time.
    """
    if not adjustable(launch):
        return raw_step_s(launch)
    if len(launch.step_delay_s) == len(launch.step_s) > 0:
        delays = zip(launch.step_s, launch.step_delay_s, strict=True)
        return stats.median([max(step - delay, 0.0) for step, delay in delays])
    return raw_step_s(launch) * (1 - min(launch.delay_share or 0.0, 1.0))


def adjustable(launch: Launch) -> bool:
    """Return whether run-delay was recorded and can be laid to other processes."""
    return launch.delay_share is not None and not launch.crowded


def seconds(launch: Launch, quantity: Quantity, adjusted: bool) -> float:
    """Return what is compared, in seconds: per sample (throughput) or from call to first step (start).

    Start-up is never adjusted: how much ranks wait for each other while they start is the launcher's own doing.
    """
    if quantity == "start":
        return launch.start_s
    return (launch_step_s if adjusted else raw_step_s)(launch) / launch.samples_per_step


def typical(launches: Sequence[Launch], quantity: Quantity) -> tuple[float, float]:
    """Return the number for a table and the one after its +-, as measured, in seconds per step or of start-up.

    Of several launches, their median and spread; of one, the median and spread of its steps (start-up: spread NaN).
    """
    if quantity == "start":
        values: Sequence[float] = [launch.start_s for launch in launches]
    else:
        values = launches[0].step_s if len(launches) == 1 else [raw_step_s(launch) for launch in launches]
    return stats.median(values), stats.spread(values) if len(values) > 1 else math.nan


def contamination(launch: Launch) -> list[str]:
    """Return why the launch cannot be trusted, a reason a line; empty where nothing disturbed it.

    Run-delay and CPU pressure do not count against a launch whose own threads outnumber the cores: it makes them.
    """
    reasons = [] if launch.crowded else _foreign_load(launch)
    if launch.throttled > 0:
        reasons.append(f"throttled {launch.throttled} times")
    if launch.major_faults > 0:
        reasons.append(f"{launch.major_faults} major page faults")
    return reasons


def _foreign_load(launch: Launch) -> list[str]:
    reasons = []
    share, switches = launch.delay_share, launch.involuntary_switches / max(1, len(launch.step_s))
    if share is not None and share > RUN_DELAY_LIMIT:
        reasons.append(f"run-delay {100 * share:.1f} %")
    if share is None and switches > SWITCHES_PER_STEP_LIMIT:
        reasons.append(f"{switches:.1f} involuntary context switches per step")
    if launch.cpu_pressure is not None and launch.cpu_pressure > CPU_PRESSURE_LIMIT:
        reasons.append(f"CPU pressure {100 * launch.cpu_pressure:.1f} %")
    return reasons


# The order of launches


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
    random.Random(seed).shuffle(forward)
    turns: list[tuple[int | None, str]] = [(None, forward[0])] if pilot else []
    turns += [(pair, arm) for pair in range(pairs) for arm in (forward[::-1] if pair % 2 else forward)]
    return [Slot(order, pair, arm) for order, (pair, arm) in enumerate(turns)]


def repeats(slots: Sequence[Slot], launches: Sequence[Launch]) -> list[Slot]:
    """Return the launches to make again: pairs with a contaminated or missing launch, at most 2 over the comparison.

    A repeated pair keeps the order of its arms, so that the balance of the schedule holds. Call it again after the
    repeats with both lists extended; it returns nothing when all is clean or the extra pairs are used up.
    """
    replaced = {slot.replaces for slot in slots if slot.replaces is not None}
    arms_of = _arms_by_pair(slots)
    clean = Counter(launch.pair for launch in launches if not contamination(launch))
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


# What may be compared

CONDITIONS: Mapping[str, Callable[[Launch], object]] = {
    "nprocs": lambda launch: launch.nprocs,
    "threads": lambda launch: launch.threads,
    "machine": lambda launch: launch.machine,
    "global_batch_size": lambda launch: launch.samples_per_step,
    "steps": lambda launch: len(launch.step_s),
}
"""What must be equal in all launches of a comparison, under the name that the user knows."""


def require_comparable(launches: Sequence[Launch], varied: Iterable[str] = ()) -> None:
    """Pass where all launches ran under the same conditions.

    Args:
        launches: The first is the one the others are held against.
        varied: Names of :data:`CONDITIONS` that are themselves what is compared, such as ``nprocs``.

    Raises:
        NotComparable: The message names arms, conditions and both values.
    """
    first = launches[0]
    for other in launches[1:]:
        values = [(name, of(other), of(first)) for name, of in CONDITIONS.items() if name not in set(varied)]
        differing = "; ".join(f"{name} is {theirs} against {ours}" for name, theirs, ours in values if theirs != ours)
        if differing:
            raise NotComparable(f"{_named(other, first)} cannot be compared with {_named(first, other)}: {differing}.")


def _named(launch: Launch, other: Launch) -> str:
    return launch.arm if launch.arm != other.arm else f"{launch.arm} (launch {launch.order})"


# The verdict


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
        contaminated: Numbers of the pairs that were left out, with the reasons.
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
    needed_pairs: int | None
    sentences: tuple[str, ...]

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
    arms = [_counted(baseline, "the baseline"), _counted(candidate, "the candidate")]
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
    alone: int
    adjusted: bool
    logs: list[float]
    raw_logs: list[float]


def _evidence(arms: Sequence[Mapping[int, Launch]], quantity: Quantity, margin: float) -> _Evidence:
    pairs = {pair: (arms[0][pair], arms[1][pair]) for pair in sorted(arms[0].keys() & arms[1].keys())}
    dirty = {pair: reasons for pair, both in pairs.items() if (reasons := _reasons(both))}
    clean = [both for pair, both in pairs.items() if pair not in dirty]
    # Subtracting in one arm alone, or in some pairs, would make a difference of its own.
    adjust = quantity == "throughput" and all(adjustable(launch) for both in clean for launch in both)
    logs, raw_logs = _logs(clean, quantity, adjust), _logs(clean, quantity, False)
    return _Evidence(quantity, margin, clean, dirty, len(arms[0].keys() ^ arms[1].keys()), adjust, logs, raw_logs)


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


def _counted(launches: Sequence[Launch], role: str) -> dict[int, Launch]:
    counted = {launch.pair: launch for launch in launches if launch.pair is not None}
    if not counted:
        name = launches[0].arm if launches else role
        raise NotComparable(f"{name} has no launch that counts: all failed, or only the pilot was made.")
    return counted


def _reasons(both: Sequence[Launch]) -> tuple[str, ...]:
    return tuple(f"{launch.arm}: {reason}" for launch in both for reason in contamination(launch))


def _logs(pairs: Sequence[Sequence[Launch]], quantity: Quantity, adjusted: bool) -> list[float]:
    """Return ln(T_candidate / T_baseline) of each pair."""
    columns = [[seconds(launch, quantity, adjusted) for launch in arm] for arm in zip(*pairs, strict=True)]
    return stats.log_ratios(*columns) if columns else []


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


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _as_said(ratio: float, verdict: Claim) -> float:
    """Return the factor that stands before "faster": baseline over candidate; else candidate over baseline."""
    return 1 / ratio if verdict == "faster" else ratio


def _interval(logs: Sequence[float], verdict: Claim) -> str:
    interval = stats.paired_ratio(logs).interval
    if interval is None:
        return _plural(len(logs), "pair")
    low, high = sorted((_as_said(interval.low, verdict), _as_said(interval.high, verdict)))
    of = "" if verdict in ("faster", "slower") else "of the time ratio "
    return f"95 % interval {of}{_times(low)} to {_times(high)}, {_plural(len(logs), 'pair')}"


def _said(verdict: Claim, logs: Sequence[float], margin: float) -> str:
    factor = _as_said(stats.paired_ratio(logs).ratio, verdict)
    words = {"equivalent": _within(margin), "inconclusive": "inconclusive"}
    return f"{words.get(verdict) or f'{_times(factor)}x {verdict}'} ({_interval(logs, verdict)})"


def _headline(verdict: Claim, found: _Evidence, needed: int | None) -> str:
    logs, margin = found.logs, found.margin
    if verdict != "inconclusive":
        return _said(verdict, logs, margin)
    if not (logs or found.dirty):
        return "inconclusive: no launch of one arm has a partner in the other"
    if not logs:
        return f"inconclusive: no clean pair ({_plural(len(found.dirty), 'pair')} contaminated)"
    if len(logs) == 1:
        guess = f"; if launches vary as much as steps do, {_settle(needed, 0, margin)}" if needed else ""
        return f"inconclusive: one launch claims nothing beyond its own spread{guess}"
    if contradict(logs, found.raw_logs, margin):
        ours, theirs = (_said(claim(of, margin), of, margin) for of in (logs, found.raw_logs))
        return f"inconclusive: without run-delay {ours}, but as measured {theirs}"
    return f"inconclusive: {_settle(needed, len(logs), margin)} ({_interval(logs, verdict)})"


def _settle(needed: int | None, used: int, margin: float) -> str:
    if needed is None:
        return f"more than {stats.MOST_PAIRS} pairs would be needed to settle {_percent(margin)} %"
    # From 6 pairs on both intervals move in steps, so that what was used can be enough on paper: then 1 more.
    more = max(1, needed - used)
    return f"{more} {'more ' if used else ''}{'pair' if more == 1 else 'pairs'} would settle {_percent(margin)} %"


def _notes(found: _Evidence) -> list[str]:
    notes = [f"pair {pair} is left out as contaminated: {', '.join(reasons)}." for pair, reasons in found.dirty.items()]
    if found.alone:
        notes.append(f"left out, as the other arm's launch is missing: {found.alone}.")
    if len(found.clean) == 1:
        notes.append(_own_spreads(found.clean[0], found.quantity))
    if found.quantity == "throughput" and found.clean:
        notes.append(_on_adjustment(found))
        notes += [note for arm in zip(*found.clean, strict=True) if (note := _on_steadiness(arm))]
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
    crowded = next((launch for both in found.clean for launch in both if launch.crowded), None)
    if crowded is None:
        return "run-delay was not recorded in every launch: times are as measured."
    asked = f"{_plural(crowded.nprocs, 'rank')} with {_plural(max(1, crowded.threads), 'thread')} each"
    cores = _plural(crowded.cores or 0, "core")
    return f"{crowded.arm} runs {asked} on {cores}: its run-delay is its own, none is subtracted."


def _on_steadiness(arm: Sequence[Launch]) -> str:
    found = [steady for launch in arm if (steady := stats.steadiness(launch.step_s)) and not steady.steady]
    if not found:
        return ""
    factor = stats.median([steady.last / steady.first for steady in found])
    counted = f"{len(found)} of {len(arm)} launches"
    return f"{arm[0].arm} is not steady in {counted}: the last quarter's steps take {factor:.2f} times the first's."


# What this machine can tell apart


@dataclass(frozen=True)
class Resolution:
    """What a launcher compared with itself shows about the machine.

    Attributes:
        ratio: The smallest ratio that as many pairs find with 80 % probability (95 % level).
        apparent: The ratio found between equals; its interval should hold 1.
        biased: True where it does not, so that ratios up to the apparent one mean nothing.
    """

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
    counted = sorted((launch for launch in launches if launch.pair is not None), key=lambda launch: launch.order)
    require_comparable(counted)
    pairs = zip(counted[::2], counted[1::2], strict=False)
    turned = [(b, a) if i % 2 else (a, b) for i, (a, b) in enumerate(pairs)]
    clean = [both for both in turned if not _reasons(both)]
    if len(clean) < 2:
        return None
    logs = _logs(clean, quantity, all(adjustable(launch) for both in clean for launch in both))
    inner, df = stats.location_interval(logs), len(logs) - 1
    share = stats.student_t_quantile(power, df) / stats.student_t_quantile(0.975, df)
    smallest = math.exp((inner.high - inner.low) / 2 * (1 + share))
    return _resolution(smallest, stats.paired_ratio(logs), not inner.contains(0.0))


def _resolution(smallest: float, apparent: stats.PairedRatio, biased: bool) -> Resolution:
    sentence = f"this machine tells ratios from {_times(smallest)} apart with {apparent.pairs} pairs"
    if biased:
        sentence += f"; but a launcher differs from itself by {_times(apparent.ratio)}: smaller ratios mean nothing"
    return Resolution(smallest, apparent, biased, sentence)


# Scaling


@dataclass(frozen=True)
class Scaling:
    """Efficiency of N ranks in two factors, each with its interval; all None where scaling is not defined.

    Attributes:
        efficiency: Plain process to N ranks, 1 is perfect: the product of the other two.
        wrapping: Plain process to DDP with one rank.
        spreading: DDP with one rank to N ranks.
    """

    kind: Literal["weak", "strong"]
    nprocs: int
    efficiency: stats.PairedRatio | None
    wrapping: stats.PairedRatio | None
    spreading: stats.PairedRatio | None
    sentence: str


def scaling(
    kind: Literal["weak", "strong"], plain: Sequence[Launch], single: Sequence[Launch], many: Sequence[Launch]
) -> Scaling:
    """Return weak efficiency T(1,b) / T(N,Nb), or strong T(1,B) / (N T(N,B)); T is the time of a step.

    Args:
        kind: ``weak`` (the batch of a rank stays) or ``strong`` (the global batch stays).
        plain: Launches of one process without DDP, which count as (1, b).
        single: Launches of DDP with one rank.
        many: Launches of DDP with N ranks; all three are joined by ``pair``.

    Raises:
        NotComparable: Conditions or batch sizes do not fit.
    """
    arms = [_counted(arm, name) for arm, name in ((plain, "plain"), (single, "DDP of 1 rank"), (many, "DDP"))]
    last = next(iter(arms[2].values()))
    _require_scalable(kind, arms, last.nprocs)
    if any(launch.oversubscribed for launch in arms[2].values()):
        return Scaling(kind, last.nprocs, None, None, None, "oversubscribed, scaling not defined")
    triples = [tuple(arm[pair] for arm in arms) for pair in sorted(arms[0].keys() & arms[1].keys() & arms[2].keys())]
    clean = [triple for triple in triples if not _reasons(triple)]
    if not clean:
        return Scaling(kind, last.nprocs, None, None, None, "all launches contaminated, no number")
    return _scaling(kind, last.nprocs, clean)


def _require_scalable(kind: str, arms: Sequence[Mapping[int, Launch]], nprocs: int) -> None:
    one_process = [*arms[0].values(), *arms[1].values()]
    require_comparable(one_process)
    require_comparable([one_process[0], *arms[2].values()], varied=("nprocs", "global_batch_size"))
    require_comparable([*arms[2].values()])
    factor = nprocs if kind == "weak" else 1
    first, last = one_process[0], next(iter(arms[2].values()))
    if first.nprocs != 1:
        raise NotComparable(f"scaling starts from one process: nprocs is {first.nprocs} in {first.arm}.")
    if last.samples_per_step != factor * first.samples_per_step:
        needed = f"global_batch_size={factor * first.samples_per_step}, not {last.samples_per_step}"
        raise NotComparable(f"{kind} scaling of {first.arm} to {nprocs} ranks needs {needed}, in {last.arm}.")


def _scaling(kind: Literal["weak", "strong"], nprocs: int, triples: Sequence[tuple[Launch, ...]]) -> Scaling:
    adjust = all(adjustable(launch) for triple in triples for launch in triple)
    step_s = launch_step_s if adjust else raw_step_s
    plain, single, many = ([step_s(launch) for launch in arm] for arm in zip(*triples, strict=True))
    # T(1,B) / (N T(N,B)) against T(1,b) / T(N,Nb): only strong scaling divides the same work.
    scaled = [(nprocs if kind == "strong" else 1) * value for value in many]
    wrapping = stats.paired_ratio(stats.log_ratios(single, plain))
    spreading = stats.paired_ratio(stats.log_ratios(scaled, single))
    efficiency = stats.paired_ratio(stats.log_ratios(scaled, plain))
    factors = f"{wrapping.ratio:.2f} (plain process to DDP) x {spreading.ratio:.2f} (1 to {nprocs} ranks)"
    sure = "one launch each, no interval" if efficiency.interval is None else _efficiency_interval(efficiency)
    sentence = f"{kind} scaling to {_plural(nprocs, 'rank')}: efficiency {efficiency.ratio:.2f} ({sure}) = {factors}"
    return Scaling(kind, nprocs, efficiency, wrapping, spreading, sentence)


def _efficiency_interval(efficiency: stats.PairedRatio) -> str:
    assert efficiency.interval is not None
    low, high = efficiency.interval.low, efficiency.interval.high
    return f"95 % interval {low:.2f} to {high:.2f}, {_plural(efficiency.pairs, 'triple')}"


# Communication


@dataclass(frozen=True)
class Straggler:
    """The slowest rank: how much slower than the typical one, which rank, and in what share of the steps."""

    index: float
    rank: int
    share: float


def straggler(compute_s: Sequence[Sequence[float]]) -> Straggler:
    """Return the straggler index: the median over steps of (slowest rank / median rank); 1 means none.

    Args:
        compute_s: ``[rank][step]``, in seconds, each rank's own work, without waiting for others. Whole steps will not
            do: every rank waits for the slowest in the all-reduce, and all take as long as it.
    """
    steps = list(zip(*compute_s, strict=True))
    slowest = [max(range(len(step)), key=step.__getitem__) for step in steps]
    rank, count = Counter(slowest).most_common(1)[0]
    index = stats.median([max(step) / stats.median(step) for step in steps])
    return Straggler(index, rank, count / len(steps))


def algorithm_bandwidth(num_bytes: int, time_s: float) -> float:
    """Return algbw in bytes per second: the size of the buffer over the time of the collective (nccl-tests)."""
    return num_bytes / time_s


def bus_bandwidth(num_bytes: int, time_s: float, world_size: int) -> float:
    """Return busbw of an all-reduce in bytes per second, algbw x 2 (N - 1) / N (nccl-tests, PERFORMANCE.md).

    What each rank's link must carry at least; comparable over numbers of ranks. 0 for one rank, which sends nothing.
    """
    return algorithm_bandwidth(num_bytes, time_s) * 2 * (world_size - 1) / world_size


def exposed_share(comm_s: float, overlap_s: float, step_s: float) -> float:
    """Return the share of a step in which communication alone held it up: (communication - overlap) / step.

    In the terms of DDP's logging data: ``avg_backward_comm_time``, ``avg_backward_compute_comm_overlap_time``.
    """
    return max(0.0, comm_s - overlap_s) / step_s


# Phases

PHASES: Mapping[str, Owner] = {
    "called": "launcher",
    "process exists": "launcher",
    "code entered": "launcher",
    "torch imported": "launcher",
    "lazy imports done": "launcher",
    "group ready": "framework",
    "data and model": "framework",
    "DDP built": "framework",
    "first step": "framework",
    "warm": "framework",
    "last step": "framework",
    "group destroyed": "framework",
    "returned": "launcher",
}
"""The marks in order; each ends the phase of its name. The owner is who decides how long that phase takes.

Imports are the launcher's: one that preloads does this work before a process exists, one with fresh interpreters in
every rank. Whichever phase it falls into, its owner must be the same, or preloading would look like a faster framework.
"""


@dataclass(frozen=True)
class Phase:
    """The time between two marks; ``since`` is the mark before, ``called`` at the earliest."""

    phase: str
    seconds: float
    owner: Owner
    since: str


def phases(marks: Mapping[str, float]) -> list[Phase]:
    """Return the phases of one rank, in order.

    Where a mark is missing, its phase is joined to the next one that has a mark; what cannot be laid to the launcher
    alone is the framework's. A mark earlier than the one before (work that a server did in advance) takes 0 s.

    Args:
        marks: Name -> CLOCK_MONOTONIC in seconds; the parent's ``called`` and ``returned`` among them.

    Raises:
        ValueError: A mark has a name that is not in :data:`PHASES`.
    """
    unknown = marks.keys() - PHASES.keys()
    if unknown:
        raise ValueError(f"unknown marks {sorted(unknown)}; known are {list(PHASES)}")
    result: list[Phase] = []
    since, reached, owners = "", math.nan, set[Owner]()
    for name, owner in PHASES.items():
        owners.add(owner)
        at = marks.get(name, math.nan)
        if not math.isfinite(at):
            continue
        if since:
            result.append(Phase(name, max(0.0, at - reached), _sole(owners), since))
        # max: after a mark made in advance, time goes on from the latest one, so that the phases add up.
        since, reached, owners = name, at if math.isnan(reached) else max(reached, at), set()
    return result


def _sole(owners: set[Owner]) -> Owner:
    return "launcher" if owners == {"launcher"} else "framework"


def slowest(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return for each phase the time of the rank that took longest, in seconds; ``ranks`` are the marks of each."""
    longest: dict[str, float] = {}
    for marks in ranks:
        for phase in phases(marks):
            longest[phase.phase] = max(longest.get(phase.phase, 0.0), phase.seconds)
    return longest


def by_owner(parts: Iterable[Phase]) -> dict[Owner, float]:
    """Return the seconds of the launcher and of the framework."""
    totals: dict[Owner, float] = {"launcher": 0.0, "framework": 0.0}
    for part in parts:
        totals[part.owner] += part.seconds
    return totals

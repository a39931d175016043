"""A verdict on speed as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.compare.correctness.agreement import plural
from harness.compare.performance import stats
from harness.compare.performance.claim import Claim, PairEvidence, claim, contradict
from harness.compare.performance.launches import Launch, Quantity, adjustable, typical


def times(value: float) -> str:
    """Return a ratio in about three digits."""
    # 9.995 and not 10: 9.996 would be rounded to 10.00, which has a digit too many.
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}"


def within(margin: float) -> str:
    """Return what an equivalent pair is called."""
    return f"equivalent +-{_percent(margin)}%"


def as_told(ratio: float, verdict: Claim) -> float:
    """Return the factor that stands before "faster": baseline over candidate; else candidate over baseline."""
    return 1 / ratio if verdict == "faster" else ratio


def _interval(logs: Sequence[float], verdict: Claim) -> str:
    interval = stats.paired_ratio(logs).interval
    if interval is None:
        return plural(len(logs), "pair")
    # The reciprocal of an interval has its ends the other way round.
    low, high = sorted((as_told(interval.low, verdict), as_told(interval.high, verdict)))
    of = "" if verdict in ("faster", "slower") else "of the time ratio "
    return f"95 % interval {of}{times(low)} to {times(high)}, {plural(len(logs), 'pair')}"


def _said(verdict: Claim, logs: Sequence[float], margin: float) -> str:
    factor = as_told(stats.paired_ratio(logs).ratio, verdict)
    words = {"equivalent": within(margin), "inconclusive": "inconclusive"}
    return f"{words.get(verdict) or f'{times(factor)}x {verdict}'} ({_interval(logs, verdict)})"


def headline(verdict: Claim, evidence: PairEvidence, needed: int | None) -> str:
    """Return the verdict as a sentence."""
    logs, margin = evidence.logs, evidence.margin
    if verdict != "inconclusive":
        return _said(verdict, logs, margin)
    if not (logs or evidence.dirty or evidence.untold):
        return "inconclusive: no launch of one arm has a partner in the other"
    if not logs:
        return f"inconclusive: no clean pair ({_left_out(evidence)})"
    # A guess, and called one: from a single pair nobody knows how launches vary.
    if len(logs) == 1:
        guess = f"; if launches vary as much as steps do, {_settle(needed, 0, margin)}" if needed else ""
        return f"inconclusive: {_only_one(evidence)} claims nothing beyond its own spread{guess}"
    # Both are quoted: which of them to believe is for the reader to decide.
    if contradict(logs, evidence.raw_logs, margin):
        adjusted, raw = (_said(claim(of, margin), of, margin) for of in (logs, evidence.raw_logs))
        return f"inconclusive: without run-delay {adjusted}, but as measured {raw}"
    return f"inconclusive: {_settle(needed, len(logs), margin)} ({_interval(logs, verdict)})"


def _left_out(evidence: PairEvidence) -> str:
    disturbed = [f"{plural(len(evidence.dirty), 'pair')} disturbed"] if evidence.dirty else []
    vague = [why[0] for why in evidence.untold.values()]
    return ", ".join([*disturbed, *vague[:1]])


def _only_one(evidence: PairEvidence) -> str:
    others = len(evidence.dirty) + len(evidence.untold) + evidence.alone
    return f"1 of {others + 1} pairs was clean, and one pair" if others else "one launch"


def _settle(needed: int | None, used: int, margin: float) -> str:
    if needed is None:
        return f"more than {stats.MOST_PAIRS} pairs would be needed to settle {_percent(margin)} %"
    # From 6 pairs on both intervals move in steps, so that what was used can be enough on paper: then 1 more.
    more = max(1, needed - used)
    return f"{more} {'more ' if used else ''}{'pair' if more == 1 else 'pairs'} would settle {_percent(margin)} %"


def remarks(evidence: PairEvidence) -> list[str]:
    """Return what the reader must know beside the verdict."""
    notes = [f"pair {pair} is left out as disturbed: {', '.join(why)}." for pair, why in evidence.dirty.items()]
    notes += [f"pair {pair} is left out, as nobody can tell: {', '.join(why)}." for pair, why in evidence.untold.items()]
    if evidence.alone:
        notes.append(f"left out, as the other arm's launch is missing: {evidence.alone}.")
    if len(evidence.clean) == 1:
        notes.append(_own_spreads(evidence.clean[0], evidence.quantity))
    if evidence.quantity == "throughput" and evidence.clean:
        notes.append(_on_adjustment(evidence))
    return notes


def _own_spreads(both: Sequence[Launch], quantity: Quantity) -> str:
    parts = []
    for launch in both:
        centre, around = typical([launch], quantity)
        scale, unit = (1.0, "s") if centre >= 1 else (1000.0, "ms")
        width = "" if math.isnan(around) else f" +- {around * scale:.2f}"
        parts.append(f"{launch.arm} {centre * scale:.2f}{width} {unit}")
    # A pair holds the baseline first; a sentence begins with what is judged.
    return " against ".join(reversed(parts)) + "."


def _on_adjustment(evidence: PairEvidence) -> str:
    if evidence.adjusted:
        raw = stats.paired_ratio(evidence.raw_logs).ratio
        return f"as measured, run-delay included: time ratio {times(raw)} ({_interval(evidence.raw_logs, 'slower')})."
    launches = [launch for both in evidence.clean for launch in both]
    if any(launch.delay_share is None for launch in launches):
        return "run-delay was not recorded in every launch: times are as measured."
    # There is one: were all adjustable, times would be adjusted, and all would be said above.
    own = next(launch for launch in launches if not adjustable(launch))
    if own.quiet:
        why = f"had the cores to itself (others used {own.others:.2f} of them)"
    else:
        workers = f" and {plural(own.workers, 'data worker')}" if own.workers else ""
        asked = f"{plural(own.nprocs, 'rank')} with {plural(max(1, own.threads), 'thread')}{workers} each"
        why = f"runs {asked} on {plural(own.cores or 0, 'core')}"
    return f"{own.arm} {why}: its run-delay is its own, none is subtracted."

"""What a reader must know beside the table, in sentences. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness import stats
from harness.compare.correctness import Rung
from harness.compare.performance import PerformanceVerdict
from harness.report.bandwidth import crowded_bandwidth
from harness.report.build import may_pair
from harness.report.rungs import place
from harness.report.sweep_report import JobReport, SweepReport
from harness.report.table import launches, ranges, state, step_times
from harness.report.waiting import communication

MOST_REMARKS = 12
"""So many of the remarks on single jobs are shown."""
MOST_PAIRS = 20
"""More pairs are not advised: nobody would wait for them."""
FEWEST_STEPS = 16
"""A quarter of fewer measured steps is too short to say that the step time drifts."""


def notes(sweep: SweepReport) -> list[str]:
    """Return what every report says, a sentence each."""
    found = [f"{said}." for job in sweep.jobs for said in (*_undecided(job), *_of_rival(job), *_resolved(job))]
    found += disturbed(sweep.jobs) + compressed(sweep.jobs) + left_out(sweep.jobs) + unsteady(sweep.jobs)
    found += [f"job {job.plan.job}: {said}" for job in sweep.jobs if (said := failed_launches(job))]
    found += strayed(sweep.jobs) + communication(sweep.jobs) + crowded_bandwidth(sweep)
    found += _remarks(sweep) + _unclaimed(sweep.jobs)
    return found + [f"job {job.plan.job}: {why_red(job)}" for job in sweep.jobs if state(job) == "red"]


def _remarks(sweep: SweepReport) -> list[str]:
    found = [f"job {job.plan.job}: {said}" for job in sweep.jobs for said in sweep.remarks.get(job.plan.job, ())]
    more = len(found) - MOST_REMARKS
    return [*found[:MOST_REMARKS], *([f"{more} more remarks on single jobs stand in report.json."] if more > 0 else [])]


def how_sure(sweep: SweepReport) -> list[str]:
    """Return a line for each comparison of speeds: verdict, forecast, times as measured, spreads, and what was left out."""
    return [
        f"job {job.plan.job} against job {other}, {quantity}: {_in_full(verdict)}"
        for job in sweep.jobs
        for quantity, other, verdict in (
            ("step", job.baseline, job.speed),
            ("step", job.rival, job.pace if job.rival != job.baseline else None),
            ("first step", job.rival, job.start),
        )
        if verdict is not None
    ]


def _in_full(verdict: PerformanceVerdict) -> str:
    headline, *beside = verdict.sentences
    return " ".join([f"{headline}.", *(f"{said[0].upper()}{said[1:]}" for said in beside)])


def _undecided(job: JobReport) -> tuple[str, ...]:
    """Return why a comparison of several launches came to nothing."""
    if job.speed is None or job.speed.pairs < 2 or job.speed.verdict != "inconclusive":
        return ()
    return (f"job {job.plan.job}: {job.speed.sentences[0]}",)


def _of_rival(job: JobReport) -> list[str]:
    """Return what is claimed against the rival, and how sure that is."""
    named = f"job {job.plan.job} against job {job.rival}"
    pace = [f"{named}, step: {job.pace.sentences[0]}"] if job.pace is not None and job.rival != job.baseline else []
    return [*pace, *([f"{named}, first step: {job.start.sentences[0]}"] if job.start is not None else [])]


def _resolved(job: JobReport) -> list[str]:
    """Return what a job that was held against itself says of the machine."""
    names = {"throughput": "step", "start": "first step"}
    said = [f"job {job.plan.job} against itself, {names[one.quantity]}: {one.sentence}" for one in job.resolutions]
    return [*said, *([f"job {job.plan.job} against itself: {job.unresolved}"] if job.unresolved else [])]


def disturbed(jobs: Iterable[JobReport]) -> list[str]:
    """Return a sentence on launches that were left out because the machine was busy with something else."""
    found = [reason for job in jobs if job.speed for pair in job.speed.contaminated.values() for reason in pair]
    if not found:
        return []
    arms = dict.fromkeys(reason.partition(":")[0] for reason in found)
    numbers = [arm.removeprefix("job ") for arm in arms]
    named = f"job {ranges([int(n) for n in numbers])}" if all(n.isdigit() for n in numbers) else " and ".join(arms)
    return [f"The machine was disturbed during {named} (such as {found[0]}): speeds that rest on that are not compared."]


def compressed(jobs: Iterable[JobReport]) -> list[str]:
    """Return which jobs train something else than one process does, because their settings ask for it."""
    hooks: dict[str, list[int]] = {}
    for job in jobs:
        if job.plan.train is not None and job.plan.train.ddp.comm_hook != "none" and job.plan.nprocs > 1:
            hooks.setdefault(job.plan.train.ddp.comm_hook, []).append(job.plan.job)
    what = "gradients travel compressed, so the training is not that of one process; what was checked is the rest"
    return [f"job {ranges(numbers)}: ddp.comm_hook={hook}: {what}." for hook, numbers in hooks.items()]


def left_out(jobs: Iterable[JobReport]) -> list[str]:
    """Return for each job that left steps out (``on_nonfinite=skip``) how many, and the first."""
    found = []
    for job in jobs:
        steps = job.result.ranks[0].steps if job.result.ranks else ()
        skipped = [step.step for step in steps if step.skipped]
        if skipped:
            count = f"{len(skipped)} of {len(steps)} steps were left out because a loss was not finite"
            found.append(f"job {job.plan.job}: {count}, the first is step {skipped[0]} (counted from 0).")
    return found


def failed_launches(job: JobReport) -> str:
    """Return how many launches for a comparison failed, and the first one's message; empty where all ended well."""
    failed = [(plan, result) for plan, result in job.trials if result.status != "ok"]
    if not failed:
        return ""
    plan, result = failed[0]
    order = plan.trial.order if plan.trial else 0
    why = result.message.partition("\n")[0].rstrip(".")
    count = f"{len(failed)} of its {len(job.trials)} launches for the comparison failed"
    return f"{count} (launch {order}: {why}): {'its pair is' if len(failed) == 1 else 'their pairs are'} left out."


def strayed(jobs: Iterable[JobReport]) -> list[str]:
    """Return which launches trained something else than was verified: how fast that is says nothing of the job."""
    what = "trained other bits than the job's own run, which was verified: no speed rests on it"
    return [f"job {job.plan.job}: launch {ranges(job.strayed)} of its comparison {what}." for job in jobs if job.strayed]


def unsteady(jobs: Iterable[JobReport]) -> list[str]:
    """Return in which jobs the step time drifts, whether or not they are compared, and how far at most."""
    drifts: dict[int, float] = {}
    for job in jobs:
        runs = [times for one in launches(job) if len(times := step_times(one)) >= FEWEST_STEPS]
        found = [steady for times in runs if (steady := stats.steadiness(times)) and not steady.steady]
        if found:
            # Of several launches the one that drifts furthest: a median of drifts up and down says that there is none.
            drifts[job.plan.job] = max((steady.last / steady.first for steady in found), key=_distance)
    if not drifts:
        return []
    most = max(drifts, key=lambda number: _distance(drifts[number]))
    named = f" (job {most})" if len(drifts) > 1 else ""
    said = f"the last quarter's steps take {drifts[most]:.2f} times as long as the first's{named}"
    return [f"The step time is not steady in job {ranges(list(drifts))}: {said}."]


def _distance(drift: float) -> float:
    return abs(math.log(drift))


def _unclaimed(jobs: Sequence[JobReport]) -> list[str]:
    """Return that one launch claims nothing, and how many pairs would, where that can be forecast."""
    plans = {job.plan.job: job.plan for job in jobs}
    single = [(job, job.speed) for job in jobs if job.speed is not None and job.speed.pairs == 1]
    if not single:
        return []
    in_turn = [speed for job, speed in single if job.baseline in plans and may_pair(plans[job.baseline], job.plan)]
    forecasts = [speed.needed_pairs for speed in in_turn if speed.needed_pairs is not None]
    return [f"* No claim of speed: one pair of launches says nothing beyond its own spread.{_advice(forecasts, single[0][1])}"]


def _advice(forecasts: Sequence[int], speed: PerformanceVerdict) -> str:
    if not forecasts:
        return ""
    pairs = f"compare.pairs={max(forecasts)}" if max(forecasts) <= MOST_PAIRS else f"more than {MOST_PAIRS} pairs"
    return f" If launches vary as much as steps do, {pairs} would settle {100 * speed.margin:.3g} %."


def why_red(job: JobReport) -> str:
    """Return what failed in a red verdict, where, and what usually causes it."""
    assert job.correctness is not None and job.correctness.failed is not None
    rung = job.correctness.failed
    return f"FAILED {rung.name} ({rung.title}){place(rung)}: {explained(rung)}"


def explained(rung: Rung) -> str:
    """Return what a red rung saw, and what usually causes it, in sentences."""
    return f"{rung.detail}." + (f" Usual causes: {rung.causes}." if rung.causes else "")


def failures(sweep: SweepReport) -> list[str]:
    """Return a line for each job that failed."""
    return [f"job {job.plan.job} failed: {job.result.message}" for job in sweep.jobs if job.result.status != "ok"]

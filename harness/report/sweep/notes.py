"""What a reader must know beside the table, in sentences."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

from harness.compare.correctness.verdict import Check, Verdict
from harness.compare.performance import stats
from harness.compare.performance.verdict import PerformanceVerdict
from harness.report.figures.timeline import of_server
from harness.report.figures.waiting import communication
from harness.report.sweep.bandwidth_table import crowded_bandwidth
from harness.report.sweep.build import may_pair
from harness.report.sweep.checks_table import place
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.table import ranges, state
from harness.report.sweep.times import launches, mark, step_times
from harness.report.trace import trace_of

MOST_REMARKS = 12
"""So many of the remarks on single jobs are shown."""
MOST_PAIRS = 20
"""More pairs are not advised: nobody would wait for them."""
FEWEST_STEPS = 16
"""A quarter of fewer measured steps is too short to say that the step time drifts."""


_WHOLE, _REST = ("R7", "R8"), ("R5", "R11")
"""Checks that a proof needs: one of the first, which hold the gradient against the whole batch's, and all of the others."""


def notes(sweep: SweepReport) -> list[str]:
    """Return what every report says, a sentence each."""
    # What makes all else void comes first: a fault that was put in, a gap in the proof.
    sentences = faulty(sweep.jobs) + unproven(sweep.jobs)
    sentences += [f"{sentence}." for job in sweep.jobs for sentence in (*_claimed(job), *_of_rival(job), *_resolved(job))]
    sentences += measured_by(sweep.jobs) + disturbed(sweep.jobs) + untold(sweep.jobs) + _marked(sweep.jobs)
    sentences += compressed(sweep.jobs) + left_out(sweep.jobs) + unsteady(sweep.jobs)
    sentences += [f"job {job.plan.job}: {sentence}" for job in sweep.jobs if (sentence := failed_launches(job))]
    sentences += strayed(sweep.jobs) + communication(sweep.jobs) + crowded_bandwidth(sweep)
    sentences += _remarks(sweep) + _unclaimed(sweep.jobs) + traced(sweep)
    return sentences + [f"job {job.plan.job}: {why_red(job)}" for job in sweep.jobs if state(job) == "red"]


def _remarks(sweep: SweepReport) -> list[str]:
    remarks = [f"job {job.plan.job}: {remark}" for job in sweep.jobs for remark in sweep.remarks.get(job.plan.job, ())]
    more = len(remarks) - MOST_REMARKS
    return [*remarks[:MOST_REMARKS], *([f"{more} more remarks on single jobs stand in report.json."] if more > 0 else [])]


def how_sure(sweep: SweepReport) -> list[str]:
    """Return a line for each comparison of speeds: verdict, forecast, times as measured, spreads, and what was left out."""
    return [
        f"job {job.plan.job} against job {other}, {quantity}: {_in_full(verdict)}"
        for job in sweep.jobs
        for quantity, other, verdict in (
            ("step", job.baseline, job.speed),
            # Against a rival that is the baseline as well, the same would be said twice.
            ("step", job.rival, job.pace if job.rival != job.baseline else None),
            ("first step", job.rival, job.start),
        )
        if verdict is not None
    ]


def _in_full(verdict: PerformanceVerdict) -> str:
    headline, *beside = verdict.sentences
    return " ".join([f"{headline}.", *(f"{sentence[0].upper()}{sentence[1:]}" for sentence in beside)])


def _claimed(job: JobReport) -> tuple[str, ...]:
    """Return what a comparison of several launches came to, with its interval and pairs, or why to nothing."""
    # That one launch each claims nothing is said once for all jobs, by _unclaimed.
    if job.speed is None or job.speed.pairs + job.speed.left_out < 2:
        return ()
    return (f"job {job.plan.job} against job {job.baseline}, step: {job.speed.sentences[0]}",)


def _of_rival(job: JobReport) -> list[str]:
    """Return what is claimed against the rival, and how sure that is."""
    named = f"job {job.plan.job} against job {job.rival}"
    pace = [f"{named}, step: {job.pace.sentences[0]}"] if job.pace is not None and job.rival != job.baseline else []
    return [*pace, *([f"{named}, first step: {job.start.sentences[0]}"] if job.start is not None else [])]


def _resolved(job: JobReport) -> list[str]:
    """Return what a job that was held against itself says of the machine."""
    names = {"throughput": "step", "start": "first step"}
    sentences = [
        f"job {job.plan.job} against itself, {names[resolution.quantity]}: {resolution.sentence}"
        for resolution in job.resolutions
    ]
    return [*sentences, *([f"job {job.plan.job} against itself: {job.unresolved}"] if job.unresolved else [])]


def disturbed(jobs: Iterable[JobReport]) -> list[str]:
    """Return a sentence on launches that were left out because the machine was busy with something else."""
    reasons = [reason for job in jobs if job.speed for pair in job.speed.contaminated.values() for reason in pair]
    if not reasons:
        return []
    what = "speeds that rest on that are not compared"
    return [f"The machine was disturbed during {_arms_of(reasons)} (such as {reasons[0]}): {what}."]


def untold(jobs: Iterable[JobReport]) -> list[str]:
    """Return a sentence on launches that were left out because nobody can tell whether they were disturbed."""
    reasons = [reason for job in jobs if job.speed for pair in job.speed.untold.values() for reason in pair]
    what = "Nobody can tell whether other processes disturbed the steps of"
    return [f"{what} {_arms_of(reasons)} (such as {reasons[0]}): no speed rests on them."] if reasons else []


def _arms_of(reasons: Iterable[str]) -> str:
    arms = dict.fromkeys(reason.partition(":")[0] for reason in reasons)
    numbers = [arm.removeprefix("job ") for arm in arms]
    # A baseline of another sweep is called by that word, and has no number here.
    jobs, others = [int(n) for n in numbers if n.isdigit()], [n for n in numbers if not n.isdigit()]
    return " and ".join([*others, *([f"job {ranges(jobs)}"] if jobs else [])])


def faulty(jobs: Iterable[JobReport]) -> list[str]:
    """Return into which jobs a fault was injected, whatever the checks made of it."""
    # Of a job that no check accuses too: a run with a fault in it must never pass for a result.
    faults: dict[str, list[int]] = {}
    for job in jobs:
        if job.plan.train is not None and job.plan.train.fault is not None:
            faults.setdefault(job.plan.train.fault, []).append(job.plan.job)
    return [f"Fault {name} was injected (job {ranges(numbers)})." for name, numbers in faults.items()]


def unproven(jobs: Iterable[JobReport]) -> list[str]:
    """Return what keeps verified jobs, none of whose checks is red, from being proved equal to one process."""
    gaps: dict[str, list[int]] = {}
    for job in jobs:
        verdict = job.correctness
        # A red verdict is told by itself, and where nothing was checked nothing was claimed.
        if verdict is not None and verdict.failed is None and verdict.num_checked and not verdict.is_proof:
            gap = next((check for check in _gaps(verdict, job.plan.nprocs) if check.status == "not checked"), None)
            if gap is not None:
                # By sentence, so that a gap that all jobs share is told once.
                gaps.setdefault(gap.sentence(), []).append(job.plan.job)
    return [f"Not proven (job {ranges(numbers)}): {sentence}" for sentence, numbers in gaps.items()]


def _gaps(verdict: Verdict, nprocs: int) -> list[Check]:
    """Return the checks that a proof needs and this one may lack, in the order in which they are looked at."""
    by_name = {check.name: check for check in verdict.checks}
    whole, rest = ([by_name[name] for name in names if name in by_name] for names in (_WHOLE if nprocs > 1 else ("R3",), _REST))
    # One of the first is enough for a proof, so that the other one is no gap then.
    return rest if any(check.status == "passed" for check in whole) else [*whole, *rest]


def measured_by(jobs: Sequence[JobReport]) -> list[str]:
    """Return which jobs' times are of launches for a comparison, and what those leave out."""
    several = [job.plan.job for job in jobs if job.trials and launches(job)]
    if not several:
        return []
    sentence = (
        f"First step, step and samples/s of job {ranges(several)} are of launches for the comparison, which verify nothing"
    )
    sentence += f", {served}" if (served := of_server(jobs)) else ""
    own = [job.plan.job for job in jobs if job.plan.train is not None and not job.trials and job.result.status == "ok"]
    sentence += f"; those of job {ranges(own)} are of {'its own run' if len(own) == 1 else 'their own runs'}" if own else ""
    return [f"{sentence}."]


def _marked(jobs: Iterable[JobReport]) -> list[str]:
    """Return what the mark after a number means."""
    numbers = [job.plan.job for job in jobs if mark(job)]
    what = "of no launch for the comparison is it known that nothing disturbed its steps, so the number is of all of them"
    return [f"! job {ranges(numbers)}: {what}."] if numbers else []


def traced(sweep: SweepReport) -> list[str]:
    """Return where the traces of jobs lie that were profiled, by their paths within the sweep's folder."""
    paths = [trace for job in sweep.jobs if (trace := trace_of(job)) is not None]
    places = ", ".join(os.path.relpath(path, sweep.folder) for path in paths)
    return [f"What ranks did inside 10 steps: {places}, in the sweep's folder, for https://ui.perfetto.dev."] if paths else []


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
    sentences = []
    for job in jobs:
        steps = job.result.ranks[0].steps if job.result.ranks else ()
        # Rank 0's steps do: a step is left out on all ranks or on none.
        skipped = [step.step for step in steps if step.skipped]
        if skipped:
            count = f"{len(skipped)} of {len(steps)} steps were left out because a loss was not finite"
            sentences.append(f"job {job.plan.job}: {count}, the first is step {skipped[0]} (counted from 0).")
    return sentences


def failed_launches(job: JobReport) -> str:
    """Return how many launches for a comparison failed, and the first one's message; empty where all ended well."""
    failed = [(plan, result) for plan, result in job.trials if result.status != "ok"]
    if not failed:
        return ""
    plan, result = failed[0]
    order = plan.trial.order if plan.trial else 0
    # The first line, as a note is a sentence.
    why = result.account.partition("\n")[0].rstrip(".")
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
        # Of a job that failed, or was ended, nobody asks whether it would have become steady.
        done = launches(job) if job.result.status == "ok" else []
        runs = [times for launch in done if len(times := step_times(launch)) >= FEWEST_STEPS]
        unsteady_runs = [steady for times in runs if (steady := stats.steadiness(times)) and not steady.steady]
        if unsteady_runs:
            # Of several launches the one that drifts furthest: a median of drifts up and down says that there is none.
            drifts[job.plan.job] = max((steady.last / steady.first for steady in unsteady_runs), key=_distance)
    if not drifts:
        return []
    most = max(drifts, key=lambda number: _distance(drifts[number]))
    named = f" (job {most})" if len(drifts) > 1 else ""
    drift = f"the last quarter's steps take {drifts[most]:.2f} times as long as the first's{named}"
    return [f"The step time is not steady in job {ranges(list(drifts))}: {drift}."]


def _distance(drift: float) -> float:
    # Half the time and twice the time are equally far from steady.
    return abs(math.log(drift))


def _unclaimed(jobs: Sequence[JobReport]) -> list[str]:
    """Return that one launch claims nothing, and how many pairs would, where that can be forecast."""
    plans = {job.plan.job: job.plan for job in jobs}
    single = [(job, job.speed) for job in jobs if job.speed is not None and job.speed.pairs == 1]
    if not single:
        return []
    # More pairs are no advice for jobs that cannot be launched in pairs.
    in_turn = [speed for job, speed in single if job.baseline in plans and may_pair(plans[job.baseline], job.plan)]
    forecasts = [speed.needed_pairs for speed in in_turn if speed.needed_pairs is not None]
    return [f"* No claim of speed: one pair of launches says nothing beyond its own spread.{_advice(forecasts, single[0][1])}"]


def _advice(forecasts: Sequence[int], speed: PerformanceVerdict) -> str:
    if not forecasts:
        return ""
    # The largest, as one setting is for all comparisons of a sweep.
    pairs = f"compare.pairs={max(forecasts)}" if max(forecasts) <= MOST_PAIRS else f"more than {MOST_PAIRS} pairs"
    return f" If launches vary as much as steps do, {pairs} would settle {100 * speed.margin:.3g} %."


def why_red(job: JobReport) -> str:
    """Return what failed in a red verdict, where, and what usually causes it."""
    assert job.correctness is not None and job.correctness.failed is not None
    check = job.correctness.failed
    return f"FAILED {check.name} ({check.title}){place(check)}: {explained(check)}"


def explained(check: Check) -> str:
    """Return what a red check saw, and what usually causes it, in sentences."""
    return f"{check.detail}." + (f" Usual causes: {check.causes}." if check.causes else "")


def failures(sweep: SweepReport) -> list[str]:
    """Return a line for each job that failed, or was ended."""
    fallen = [job for job in sweep.jobs if job.result.status != "ok"]
    return [f"job {job.plan.job} {'ended' if job.ended else 'failed'}: {job.result.account}" for job in fallen]

"""From the jobs of a sweep to its report: which job is whose baseline, how fast each is, which are the same bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.compare.correctness.checks_runs import compare_runs
from harness.compare.performance.launches import Launch, contamination, untold, waiting
from harness.compare.performance.resolution import resolution, unresolved
from harness.compare.performance.verdict import MARGINS, PerformanceVerdict, compare
from harness.compare.plans import differences
from harness.errors import NotComparable
from harness.report.figures.waiting import waiting_said
from harness.report.sweep.samples import launch_of, launched_in_turn, trials_of, work
from harness.report.sweep.scaling import scaling_sentences
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.times import step_times
from harness.run.plan import RunPlan
from harness.run.record import RankResult
from harness.run.visible import visible


def sweep_report(
    folder: str, jobs: Iterable[JobReport], machine: Mapping[str, str], clock_offset_s: float | None = None
) -> SweepReport:
    """Return the report of a sweep, with texts that can be shown; what a job says of itself already is kept."""
    done: list[JobReport] = []
    machine = visible(machine)
    # In this order, because a job is held against earlier ones alone.
    for job in sorted(jobs, key=lambda job: job.plan.job):
        # Files are read and written below the folder as it is.
        shown = dataclasses.replace(visible(job), folder=job.folder)
        done.append(_compared(shown, done, machine))
    return SweepReport(folder, tuple(done), machine, clock_offset_s, remarks=_remarks(done, machine))


def _remarks(jobs: Sequence[JobReport], machine: Mapping[str, str]) -> dict[int, list[str]]:
    remarks = {job.plan.job: [f"{sentence}." for sentence in waiting_said(job)] for job in jobs}
    for number, sentence in scaling_sentences(jobs, machine):
        # Before remarks on a rank that waits: how a job scales is what its reader asked.
        remarks[number].insert(0, sentence)
    # Those are told of with their comparison, which names what was left out of it.
    compared = {number for job in jobs if job.speed or job.pace for number in (job.plan.job, job.baseline, job.rival)}
    for job in jobs:
        if job.plan.train is None or job.result.status != "ok" or job.clean or job.plan.job in compared or not step_times(job):
            continue
        trials = trials_of(job, machine) if not job.strayed else []
        remarks[job.plan.job][:0] = _doubtful(trials or [launch_of(job, machine)])
    return {number: sentences for number, sentences in remarks.items() if sentences}


def _doubtful(launches: Sequence[Launch]) -> list[str]:
    """Return what keeps a job's times from saying much, where that is so of all its launches."""
    disturbed = [contamination(launch) for launch in launches]
    if all(disturbed):
        return [f"The machine was disturbed while it ran ({disturbed[0][0]}): its times say little."]
    vague = [(untold(launch), waiting(launch)) for launch in launches]
    if all(why and waited for why, waited in vague):
        why, waited = vague[0]
        return [f"Nobody can tell whether other processes held it up: its ranks waited ({waited[0]}), and it is {why}."]
    return []


def _compared(job: JobReport, before: Sequence[JobReport], machine: Mapping[str, str]) -> JobReport:
    if job.plan.train is None or job.result.status != "ok":
        return job
    if job.identical_to is None:
        job = dataclasses.replace(job, identical_to=_twin(job, before))
    job = dataclasses.replace(_against_launchers(job, before), strayed=tuple(_strayed(job)))
    if job.baseline is not None or not step_times(job):
        return job
    job = _against_itself(_with_clean(job, machine), machine)
    # One baseline for each kind of work, the first: speeds of different work are no ratio of anything.
    base = next((earlier for earlier in before if earlier.baseline == earlier.plan.job and work(earlier) == work(job)), None)
    if base is None:
        return dataclasses.replace(job, baseline=job.plan.job)
    job = dataclasses.replace(job, baseline=base.plan.job, speed=_speed(base, job, machine))
    return _against_rival(job, before, machine)


def _against_launchers(job: JobReport, before: Sequence[JobReport]) -> JobReport:
    """Add check R10 to the verdict: the digests of a training are those of an earlier one, however either was started."""
    twins = [
        earlier
        for earlier in before
        if earlier.result.status == "ok" and digests(earlier) and not differences(earlier.plan, job.plan)
    ]
    if job.correctness is None or not twins or not digests(job):
        return job
    check = compare_runs(twins[0].plan, twins[0].result, job.plan, job.result)
    return dataclasses.replace(job, correctness=job.correctness.joined_by(check))


def _speed(base: JobReport, job: JobReport, machine: Mapping[str, str]) -> PerformanceVerdict | None:
    if base.strayed or job.strayed:
        return None
    paired = _paired(base, job)
    if not paired and (base.trials or job.trials):
        # The table shows launches that were never in turn with the other's.
        return None
    launches, base_launches = (trials_of(each, machine) if paired else [launch_of(each, machine)] for each in (job, base))
    try:
        # Ranks, and threads with them, are what a sweep varies.
        return compare(base_launches, launches, varied=("nprocs", "threads"))
    except NotComparable:
        return None


def _against_rival(job: JobReport, before: Sequence[JobReport], machine: Mapping[str, str]) -> JobReport:
    """Return the job with how it runs and starts against the first one of as many ranks; one launch says nothing of that."""
    alike = (
        earlier
        for earlier in before
        if earlier.plan.nprocs == job.plan.nprocs and work(earlier) == work(job) and _paired(earlier, job)
    )
    rival = next(alike, None)
    if rival is None or rival.strayed or job.strayed:
        return job
    try:
        arms = trials_of(rival, machine), trials_of(job, machine)
        return dataclasses.replace(job, rival=rival.plan.job, pace=compare(*arms), start=compare(*arms, "start"))
    except NotComparable:
        return job


def _paired(base: JobReport, job: JobReport) -> bool:
    return launched_in_turn((base, job)) and may_pair(base.plan, job.plan)


def _strayed(job: JobReport) -> Iterator[int]:
    """Yield the numbers of the launches whose training is not the one that was verified, bit for bit."""
    # Without deterministic kernels other bits are no sign of other training.
    if job.plan.train is not None and job.plan.train.deterministic:
        for plan, result in job.trials:
            if result.status == "ok" and digests(dataclasses.replace(job, result=result)) != digests(job):
                yield plan.trial.order if plan.trial else 0


def may_pair(plan: RunPlan, other: RunPlan) -> bool:
    """Return whether two jobs may be launched in turn: the same work, however ranks start, share it and reduce gradients.

    Work is the same too where each rank has as much of it (weak scaling).
    """
    differing = differences(plan, other)
    if "global_batch_size" in differing and _per_rank(plan) == _per_rank(other):
        del differing["global_batch_size"]
    # What is left may differ: it is how the same work is shared out and run, and not what is computed for a sample.
    return all(name in ("compile", "nprocs", "threads", "devices") or name.startswith("ddp.") for name in differing)


def _per_rank(plan: RunPlan) -> float:
    assert plan.train is not None
    return plan.train.global_batch_size / plan.nprocs


def _with_clean(job: JobReport, machine: Mapping[str, str]) -> JobReport:
    """Return the job with the numbers of the launches that its times rest on: none where training strayed in any."""
    # Two lists: a launch too short to tell of its steps is still good for its start.
    undisturbed = [launch for launch in trials_of(job, machine) if launch.step_s and not contamination(launch)]
    clean = () if job.strayed else tuple(launch.order for launch in undisturbed if not untold(launch))
    return dataclasses.replace(
        job, clean=clean, undisturbed=() if job.strayed else tuple(launch.order for launch in undisturbed)
    )


def _against_itself(job: JobReport, machine: Mapping[str, str]) -> JobReport:
    """Return the job with what its launches, held against each other, show of the machine, if that was asked for."""
    if not job.trials or job.strayed or not all(plan.trial and plan.trial.aa for plan, _ in job.trials):
        return job
    launches = trials_of(job, machine)
    try:
        # Each quantity by itself: starts vary more than steps do.
        resolutions = tuple(filter(None, (resolution(launches, quantity) for quantity in MARGINS))) if launches else ()
        return dataclasses.replace(job, resolutions=resolutions, unresolved=unresolved(launches))
    except NotComparable as error:
        return dataclasses.replace(job, unresolved=f"nothing can be said: {str(error).rstrip('.')}")


# The same, bit for bit


def _twin(job: JobReport, before: Sequence[JobReport]) -> int | None:
    """Return the first job that trained the same bits at the same work: what was proved of another's says nothing here."""
    own = digests(job)
    twins = (
        earlier
        for earlier in before
        if own and earlier.result.status == "ok" and digests(earlier) == own and work(earlier) == work(job)
    )
    return next((earlier.plan.job for earlier in twins), None)


def digests(job: JobReport) -> list[tuple[Any, ...]]:
    """Return the digests of every rank at every recorded step; empty where any rank has none after training."""
    ranks = [_trained(rank) for rank in job.result.ranks]
    return [pair for rank in ranks for pair in rank] if ranks and all(ranks) else []


def _trained(rank: RankResult) -> list[tuple[Any, ...]]:
    recorded = [tuple(sorted((name, str(value)) for name, value in digest.items())) for digest in rank.digests]
    # A digest at birth alone says nothing about training.
    return recorded if any(digest.get("done", 0) for digest in rank.digests) else []

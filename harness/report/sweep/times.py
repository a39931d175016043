"""The times that a sweep's table and pictures show: each in seconds, NaN where there is none. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from harness.compare.performance import stats
from harness.report.sweep.sweep_report import JobReport
from harness.run.record import ratio


def step_times(job: JobReport) -> list[float]:
    """Return the slowest rank's time of each measured step, in seconds; warm-up is left out."""
    # In the first steps caches fill, and DDP lays out its buckets anew.
    warmup = job.plan.train.warmup_steps if job.plan.train else 0
    return job.result.step_seconds()[warmup:]


def launches(job: JobReport) -> list[JobReport]:
    """Return the launches that a job's steps rest on: its own run, or of a comparison those that nothing disturbed.

    Where there is none of these, it is all that ended well, which :func:`mark` then says; none where training strayed.
    """
    return _trials(job, job.clean or job.undisturbed) if job.trials else [job]


def starts(job: JobReport) -> list[JobReport]:
    """Return the same of its start, for which it does not matter how long the steps were."""
    return _trials(job, job.undisturbed) if job.trials else [job]


def _trials(job: JobReport, chosen: Sequence[int]) -> list[JobReport]:
    # None of a job that strayed: how fast another training is says nothing of this one.
    done = [(plan, result) for plan, result in job.trials if result.status == "ok" and not job.strayed]
    trials = [(plan, result) for plan, result in done if plan.trial and plan.trial.order in chosen]
    return [dataclasses.replace(job, plan=plan, result=result) for plan, result in trials or done]


def mark(job: JobReport, of_start: bool = False) -> str:
    """Return what stands after a number that rests on launches which were disturbed, or are too short to tell."""
    sound = job.undisturbed if of_start else job.clean
    # A job's own run is never marked: whether it was disturbed is told in a sentence.
    return " !" if not sound and job.trials and launches(job) else ""


def step_s(job: JobReport) -> float:
    """Return the median of the measured steps, and of launches where there are several, in seconds; NaN where there is none."""
    return typical_step_s(job)[0]


def typical_step_s(job: JobReport) -> tuple[float, float]:
    """Return a step's time and the number after its +-, in seconds: of one launch the steps' spread, of several theirs."""
    if job.result.status != "ok":
        # Steps up to a failure are no measurement.
        return math.nan, math.nan
    runs = [times for launch in launches(job) if (times := step_times(launch))]
    values = runs[0] if len(runs) == 1 else [stats.median(times) for times in runs]
    return (stats.median(values) if values else math.nan, stats.spread(values) if len(values) > 1 else math.nan)


def samples_per_s(job: JobReport) -> float:
    """Return how many samples all ranks together train a second, of launches their median; NaN where no step was measured."""
    if job.result.status != "ok":
        return math.nan
    rates = [rate for launch in launches(job) if not math.isnan(rate := _samples_per_s(launch))]
    return stats.median(rates) if rates else math.nan


def _samples_per_s(launch: JobReport) -> float:
    """Return the samples of the measured steps by their typical time, which is that of steps with as many samples."""
    if launch.plan.train is None:
        return math.nan
    sizes = launch.result.step_samples(launch.plan.train.global_batch_size)[launch.plan.train.warmup_steps :]
    # The last batch of an epoch may be smaller, and its step shorter: one time for all steps would fit neither size.
    of_size: dict[int, list[float]] = {}
    for size, seconds in zip(sizes, step_times(launch), strict=True):
        of_size.setdefault(size, []).append(seconds)
    return ratio(sum(sizes), sum(len(times) * stats.median(times) for times in of_size.values()))


def first_step_s(job: JobReport) -> float:
    """Return the seconds from the call to the end of the first step on all ranks, of one run; NaN without one."""
    if "called" not in job.result.marks:
        return math.nan
    value = job.result.first_step_s()
    return math.nan if value is None else value


def typical_first_step_s(job: JobReport) -> float:
    """Return the same, as the median over launches where there are several; NaN where there is none."""
    seconds = [first_step_s(launch) for launch in starts(job)]
    return stats.median(seconds) if seconds else math.nan


def wall_s(job: JobReport) -> float:
    """Return the seconds from the call to the return; NaN where either was not recorded."""
    marks = job.result.marks
    return marks.get("returned", math.nan) - marks.get("called", math.nan)

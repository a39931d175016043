"""From what a run recorded to the phases and times that pictures show. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.compare.performance import stats
from harness.compare.performance.phases import PHASES, Phase, phases
from harness.report.sweep.sweep_report import JobReport
from harness.run.launch_methods import is_served
from harness.run.record import RankResult, RunResult

OF_PARENT = {"called": "called", "process exists": "started", "returned": "returned"}
"""Phase -> the parent's mark at its end."""

LEAST_WAIT_S = 0.01
"""A shorter wait for the warm server is none: launches differ by as much."""
LAST_OF_START = "first step"


def marks_of(job: JobReport, rank: RankResult) -> dict[str, float]:
    """Return the marks of one rank with those of its parent and its steps, as far as they name a phase."""
    marks = dict(rank.marks)
    marks |= {name: job.result.marks[mark] for name, mark in OF_PARENT.items() if mark in job.result.marks}
    if rank.steps:
        # Steps carry times of their own, so that ranks need not mark these two.
        marks |= {"first step": rank.steps[0].t, "last step": rank.steps[-1].t}
    return {name: seconds for name, seconds in marks.items() if name in PHASES}


def start_up(job: JobReport) -> list[Phase]:
    """Return the phases from the call to the end of the first step, of the rank that came to it last."""
    ranks = [rank for rank in job.result.ranks if rank.steps]
    # Without the call there is nothing that a start could be measured from.
    if not ranks or "called" not in job.result.marks:
        return []
    # Training has begun only when the last rank is there: all others wait for it in the first reduction.
    last = max(ranks, key=lambda rank: rank.steps[0].t)
    parts = phases(marks_of(job, last))
    names = [phase.phase for phase in parts]
    return parts[: names.index(LAST_OF_START) + 1]


def typical_start_up(jobs: Sequence[JobReport]) -> list[Phase]:
    """Return for each phase the median over jobs; a phase that a job lacks counts as 0 s."""
    start_ups = [{phase.phase: phase for phase in start_up(job)} for job in jobs]
    start_ups = [by_name for by_name in start_ups if by_name]
    # In the order of PHASES, which no launch that lacks some of them could give.
    names = [name for name in PHASES if any(name in by_name for by_name in start_ups)]
    return [_typical(name, start_ups) for name in names]


def _typical(name: str, start_ups: Sequence[dict[str, Phase]]) -> Phase:
    # Left out, a phase that most launches lack would be as long as in those few that have it.
    seconds = stats.median([by_name[name].seconds if name in by_name else 0.0 for by_name in start_ups])
    example = next(by_name[name] for by_name in start_ups if name in by_name)
    return Phase(name, seconds, example.owner)


def server_wait(jobs: Sequence[JobReport]) -> tuple[int, float] | None:
    """Return which job was the first that a warm server forked ranks for, and how long it waited for the server's own start.

    That is how much longer its own run took from the call to the start of its ranks than the launches of its comparison do,
    all of which find the server ready. None where there are no such launches.
    """
    served = [job for job in jobs if is_served(job.plan.method, job.plan.start_method)]
    ready = [waited for job in served for _, result in job.trials if (waited := _until_started(result)) is not None]
    own = _until_started(served[0].result) if served else None
    # The difference of two noisy times may come out below 0, and nobody waits less than not at all.
    return (served[0].plan.job, max(0.0, own - stats.median(ready))) if ready and own is not None else None


def of_server(jobs: Sequence[JobReport]) -> str:
    """Return what the starts of launches under spawn leave out, in words; empty where there are none."""
    waited = server_wait(jobs)
    if waited is None:
        return ""
    number, seconds = waited
    how_long = f", for which job {number} waited {seconds:.2f} s, once per command," if seconds >= LEAST_WAIT_S else ""
    return f"under spawn from a warm server (its own start{how_long} is not included)"


def _until_started(result: RunResult) -> float | None:
    marks = result.marks
    return marks["started"] - marks["called"] if {"started", "called"} <= marks.keys() else None


def oversubscribed(job: JobReport, machine_cores: str) -> bool:
    """Return whether a job on CPU has more ranks than the machine has cores."""
    return job.plan.device == "cpu" and machine_cores.isdigit() and job.plan.nprocs > int(machine_cores)


def thinned(count: int, most: int) -> list[int]:
    """Return at most ``most`` indices of ``count`` values, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    # A set, as floor may come to one index twice.
    return sorted({math.floor(i * (count - 1) / (most - 1)) for i in range(most)})

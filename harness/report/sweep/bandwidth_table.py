"""What ``recipe=allreduce`` measured, as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.performance import stats
from harness.compare.performance.bandwidth import algorithm_bandwidth, bus_bandwidth
from harness.report.figures.timeline import oversubscribed
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.table import Table, grouped, ranges

UNITS = ((1024**2, "MiB"), (1024, "KiB"), (1, "B"))
RECIPE = "recipes.allreduce.AllReduce"
"""The recipe that measures, and trains nothing."""


def bandwidth_table(sweep: SweepReport) -> Table | None:
    """Return a row for each job and message size; None where no job measured bandwidth."""
    rows = [(job, *row) for job in sweep.jobs for row in measured(job)]
    if not rows:
        return None
    columns = ("job", "ranks", "message", "time", "algbw", "busbw")
    cells = tuple((str(job.plan.job), str(job.plan.nprocs), *_cells(job, size, time_s)) for job, size, time_s in rows)
    return Table(columns, (True,) * len(columns), cells, tuple(job.plan.job for job, *_ in rows), ("ok",) * len(rows))


def crowded_bandwidth(sweep: SweepReport) -> list[str]:
    """Return which jobs measured bandwidth with more ranks than cores."""
    cores = sweep.machine.get("cores", "")
    crowded = [job.plan.job for job in sweep.jobs if oversubscribed(job, cores) and measured(job)]
    what = "more ranks than cores take turns: bandwidths there say little of how fast messages travel"
    return [f"job {ranges(crowded)}: {what}."] if crowded else []


def measured(job: JobReport) -> list[tuple[int, float]]:
    """Return bytes and seconds of each message size: the median over repeats of the slowest rank's time."""
    ranks = [rank.facts.get("bandwidth", ()) for rank in job.result.ranks]
    # A collective is over when its last rank is through.
    return [_slowest(parts) for parts in zip(*ranks, strict=False)]


def _slowest(parts: Sequence[Sequence[float | Sequence[float]]]) -> tuple[int, float]:
    sizes, times = zip(*parts, strict=True)
    # The slowest of each repeat, then the median: a slowness that goes round among the ranks is in every repeat.
    return int(sizes[0]), stats.median([max(repeat) for repeat in zip(*times, strict=True)])


def _cells(job: JobReport, size: int, time_s: float) -> tuple[str, ...]:
    unit, name = next((unit, name) for unit, name in UNITS if size >= unit)
    rates = algorithm_bandwidth(size, time_s), bus_bandwidth(size, time_s, job.plan.nprocs)
    # MB is 10^6 bytes, as in nccl-tests; sizes of messages are powers of two, and stand in KiB and MiB.
    in_mb = [f"{grouped(rate / 1e6, 0 if rate >= 1e8 else 1)} MB/s" for rate in rates]
    return f"{size // unit} {name}", f"{grouped(time_s * 1e6)} us", *in_mb

"""Which jobs a picture shows, and what it calls them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.figures.theme import shorten
from harness.report.sweep import table as tables
from harness.report.sweep.sweep_report import JobReport, SweepReport

MOST_LINES = 8
"""A picture with a line per job, or per series of them, shows so many by name."""
NAME = 12
"""Letters of a setting's name in a label."""


def trained(sweep: SweepReport) -> list[JobReport]:
    """Return the jobs that took a step."""
    return [job for job in sweep.jobs if job.plan.train is not None and job.result.losses()]


def named(job: JobReport, sweep: SweepReport) -> str:
    """Return a job's number and what the sweep varied in it."""
    values = tables.settings(job)
    # launcher and nprocs have columns in any case; a label has only what tells one job from another.
    varied = [name for name in tables.swept(sweep.jobs) if len({tables.settings(j).get(name) for j in sweep.jobs}) > 1]
    settings = [values[n] if n == "launcher" else f"{shorten(n, NAME)} {values[n]}" for n in varied if n in values]
    return shorten(f"{job.plan.job}: {', '.join(settings)}" if settings else f"job {job.plan.job}")


def shown_of(jobs: Sequence[JobReport], most: int) -> tuple[list[JobReport], str]:
    """Return the first ``most`` jobs, and a remark where that is not all."""
    return list(jobs[:most]), f" (first {most} of {len(jobs)} jobs)" if len(jobs) > most else ""

"""What ranks wait for: the slowest of them, and communication that computing does not hide. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from harness import stats
from harness.compare.communication import Straggler, straggler
from harness.report.sweep_report import JobReport
from harness.report.table import step_times

WORTH_SAYING = 1.2
"""A straggler index above it is said."""


def straggler_of(job: JobReport) -> Straggler | None:
    """Return the slowest rank of a job's measured steps; None where computing was not recorded by itself."""
    warmup = job.plan.train.warmup_steps if job.plan.train else 0
    times = [[step.compute_s for step in rank.steps[warmup:] if step.compute_s] for rank in job.result.ranks]
    lengths = {len(each) for each in times}
    return straggler(times) if len(times) > 1 and len(lengths) == 1 and lengths != {0} else None


def exposed_share(job: JobReport) -> float | None:
    """Return the share of the measured steps in which communication alone held up the rank that it held up least.

    Of the rank that comes last: the others wait for it in the same time, which is no communication.
    """
    warmup = job.plan.train.warmup_steps if job.plan.train else 0
    steps = list(zip(*(rank.steps[warmup:] for rank in job.result.ranks), strict=False))
    least = [min((s.comm_exposed_s for s in parts if s.comm_exposed_s is not None), default=None) for parts in steps]
    known = [value for value in least if value is not None]
    return stats.median(known) / stats.median(step_times(job)) if known else None


def waiting(job: JobReport) -> Mapping[str, float | int | None]:
    """Return the numbers for machines."""
    slow = straggler_of(job)
    index, rank = (slow.index, slow.rank) if slow else (None, None)
    return {"comm_exposed_share": exposed_share(job), "straggler_index": index, "slowest_rank": rank}


def waiting_said(job: JobReport) -> list[str]:
    """Return a sentence where one rank holds up the others."""
    slow = straggler_of(job)
    if slow is None or slow.index < WORTH_SAYING:
        return []
    often = f"rank {slow.rank} is the slowest in {slow.share:.0%} of the steps"
    return [f"the slowest rank computes {slow.index:.2f} times as long as the typical one (straggler index); {often}"]

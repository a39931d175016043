"""What ranks wait for: the slowest of them, and communication that computing does not hide. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from harness.compare.performance import stats
from harness.compare.performance.bandwidth import Straggler, straggler
from harness.report.sweep.bandwidth_table import UNITS
from harness.report.sweep.sweep_report import JobReport
from harness.report.sweep.table import grouped
from harness.report.sweep.times import step_times

WORTH_SAYING = 1.2
"""A straggler index above it is said."""
FEWEST_STEPS = 16
"""In fewer measured steps, who is the slowest how often says nothing."""
SURE = 0.99
"""With this probability ranks that are alike give no sentence on one that holds up the others."""


def straggler_of(job: JobReport) -> Straggler | None:
    """Return the slowest rank of a job's measured steps; None where computing was not recorded by itself."""
    times = _compute_s(job)
    return straggler(times) if times else None


def _compute_s(job: JobReport) -> list[list[float]]:
    """Return the computing of each rank in each measured step; empty with one rank, and where it was not recorded."""
    warmup = job.plan.train.warmup_steps if job.plan.train else 0
    times = [[step.compute_s for step in rank.steps[warmup:] if step.compute_s] for rank in job.result.ranks]
    lengths = {len(each) for each in times}
    # Steps are compared rank by rank: where one recorded fewer of them, they no longer stand side by side.
    return times if len(times) > 1 and len(lengths) == 1 and lengths != {0} else []


def exposed_share(job: JobReport) -> float | None:
    """Return the share of the measured steps in which communication alone held up the rank that it held up least.

    Of the rank that comes last: the others wait for it in the same time, which is no communication.
    """
    warmup = job.plan.train.warmup_steps if job.plan.train else 0
    steps = list(zip(*(rank.steps[warmup:] for rank in job.result.ranks), strict=False))
    least = [min((s.comm_exposed_s for s in parts if s.comm_exposed_s is not None), default=None) for parts in steps]
    known = [value for value in least if value is not None]
    return stats.median(known) / stats.median(step_times(job)) if known else None


def overlap_share(job: JobReport) -> float | None:
    """Return the share of the reduction that the backward hides, of the rank whose reduction is the shortest."""
    reductions = [rank.facts["reduction"] for rank in job.result.ranks if rank.facts.get("reduction")]
    # Waiting for a late rank counts as reduction on all but that one, so that the shortest is closest to the wire.
    least = min(reductions, key=lambda reduction: reduction["comm_s"], default={"comm_s": 0.0})
    return least["comm_overlap_s"] / least["comm_s"] if least["comm_s"] else None


def bucket_bytes(job: JobReport) -> list[int]:
    """Return the sizes of the buckets in which gradients travelled; empty where they are not known."""
    facts = job.result.ranks[0].facts if job.result.ranks else {}
    return list(facts.get("reduction", {}).get("bucket_bytes", ()))


def waiting(job: JobReport) -> Mapping[str, float | int | list[int] | None]:
    """Return the numbers for machines."""
    slow = straggler_of(job)
    index, rank = (slow.index, slow.rank) if slow else (None, None)
    shares = {"comm_exposed_share": exposed_share(job), "comm_overlap_share": overlap_share(job)}
    return {**shares, "bucket_bytes": bucket_bytes(job), "straggler_index": index, "slowest_rank": rank}


def waiting_said(job: JobReport) -> list[str]:
    """Return a sentence where one rank holds up the others, in more steps than chance makes each the slowest."""
    slow = straggler_of(job)
    if slow is None or slow.index < WORTH_SAYING or not _more_than_its_share(slow, _compute_s(job)):
        return []
    often = f"rank {slow.rank} is the slowest in {slow.share:.0%} of the steps"
    return [f"the slowest rank computes {slow.index:.2f} times as long as the typical one (straggler index); {often}"]


def _more_than_its_share(slow: Straggler, times: Sequence[Sequence[float]]) -> bool:
    """Return whether the exact lower bound of the rank's share is above 1 / N; N ranks may each come out as the slowest."""
    ranks, steps = len(times), len(times[0])
    # Back to the count of which the share was made, as the bound is exact for counts.
    others = round((1 - slow.share) * steps)
    # Bonferroni: each of the N ranks might have been the one, so that each may err with 1 / N of the probability.
    return steps >= FEWEST_STEPS and 1 - stats.upper_bound(others, steps, 1 - (1 - SURE) / ranks) > 1 / ranks


def communication(jobs: Iterable[JobReport]) -> list[str]:
    """Return how much of a step is communication that nothing hides, at most, and how gradients travelled there."""
    # Of a job that failed, or hung, nobody asks how its steps were.
    done = [job for job in jobs if job.plan.nprocs > 1 and job.result.status == "ok"]
    shares = {job.plan.job: (share, job) for job in done if (share := exposed_share(job)) is not None}
    if not shares:
        return []
    # The worst, as whoever asks what communication costs wants to know where it costs most.
    number, (share, job) = max(shares.items(), key=lambda pair: pair[1][0])
    hidden, sizes = overlap_share(job), bucket_bytes(job)
    how = [f"job {number}", *([f"{hidden:.0%} of the reduction overlaps with the backward"] if hidden is not None else [])]
    how += [f"buckets of {_sizes(sizes)}"] if sizes else []
    at_most = "up to " if len(shares) > 1 else ""
    return [f"Communication that nothing hides takes {at_most}{share:.0%} of a step ({'; '.join(how)})."]


def _sizes(num_bytes: Sequence[int]) -> str:
    """Return sizes such as ``4.0 KiB, 1.0, 25.0 MiB``: the unit stands after the last one that has it."""
    # From a tenth of a unit on, which one decimal still tells: 0.5 MiB, not 512.0 KiB.
    written = [next((size / unit, name) for unit, name in UNITS if size >= unit / 10 or unit == 1) for size in num_bytes]
    runs = [
        (name, [grouped(value, int(name != "B")) for value, _ in run]) for name, run in groupby(written, lambda one: one[1])
    ]
    return ", ".join(f"{', '.join(values)} {name}" for name, values in runs)

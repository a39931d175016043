"""What communication costs, by formula. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.compare.performance import stats


@dataclass(frozen=True)
class Straggler:
    """The slowest rank: how much slower than the typical one, which rank, and in what share of the steps."""

    index: float
    rank: int
    share: float


def straggler(compute_s: Sequence[Sequence[float]]) -> Straggler:
    """Return the straggler index: the median over steps of (slowest rank / median rank); 1 means none.

    Args:
        compute_s: ``[rank][step]``, in seconds, each rank's own work, without waiting for others. Whole steps will not
            do: every rank waits for the slowest in the all-reduce, and all take as long as it.
    """
    steps = list(zip(*compute_s, strict=True))
    slowest = [max(range(len(step)), key=step.__getitem__) for step in steps]
    # By how often and not by its sum, in which one long wait would name the wrong rank.
    rank, count = Counter(slowest).most_common(1)[0]
    # Step by step, then the median: a rank that a page fault holds up once is no straggler.
    index = stats.median([max(step) / stats.median(step) for step in steps])
    return Straggler(index, rank, count / len(steps))


def algorithm_bandwidth(num_bytes: int, time_s: float) -> float:
    """Return algbw in bytes per second: the size of the buffer over the time of the collective (nccl-tests)."""
    return num_bytes / time_s


def bus_bandwidth(num_bytes: int, time_s: float, world_size: int) -> float:
    """Return busbw of an all-reduce in bytes per second, algbw x 2 (N - 1) / N (nccl-tests, PERFORMANCE.md).

    What each rank's link must carry at least; comparable over numbers of ranks. 0 for one rank, which sends nothing.
    """
    return algorithm_bandwidth(num_bytes, time_s) * 2 * (world_size - 1) / world_size

"""How fast gradients can travel here: all-reduces by message size, without a model."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

# The first all-reduces of a size make what the others find made: buffers and connections.
WARM_UP = 2


class AllReduce:
    """Times all-reduces of float32 buffers, each size four times the one before.

    Args:
        smallest_kib: Size of the first buffer in KiB.
        largest_mib: Size of the last in MiB; it takes that much memory in each rank.
        repeats: How often a size is measured; the largest ones less often, down to a quarter.
    """

    def __init__(self, smallest_kib: int = 1, largest_mib: int = 64, repeats: int = 20) -> None:
        for name, value in {"smallest_kib": smallest_kib, "largest_mib": largest_mib, "repeats": repeats}.items():
            if value < 1:
                raise ValueError(f"recipe.{name}={value} must be at least 1.")
        self.smallest, self.largest, self.repeats = smallest_kib * 1024, largest_mib * 1024**2, repeats

    def measure(self, device: torch.device) -> Iterator[tuple[int, list[float]]]:
        """Yield the size of a buffer in bytes, and the seconds that this rank took for each all-reduce of it."""
        size = self.smallest
        while size <= self.largest:
            buffer = torch.zeros(size // 4, device=device)
            # The large ones, rounded up to a whole number: they take nearly all of the time.
            repeats = self.repeats if size < 4 * 1024**2 else -(-self.repeats // 4)
            yield size, [_timed(buffer) for _ in range(WARM_UP + repeats)][WARM_UP:]
            size *= 4


def _timed(buffer: Tensor) -> float:
    # Together: a rank that comes late would have its delay measured on all others.
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(buffer)
    # On a GPU, the call returns when the work has been queued.
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - begin

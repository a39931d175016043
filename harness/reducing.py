"""What DDP itself measures of a step. Its logging is private to torch: where it is missing or changed, nothing is known."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Reducing:
    """One step of one rank, in seconds.

    Attributes:
        compute_s: Forward and backward, without waiting for other ranks.
        comm_exposed_s: From the first bucket's departure to the last one's arrival, less what the backward hid.
    """

    compute_s: float
    comm_exposed_s: float


def watch(ddp: DistributedDataParallel | None) -> None:
    """Have DDP measure every step, where it would one in a hundred."""
    if ddp is not None and hasattr(ddp, "_set_ddp_runtime_logging_sample_rate"):
        ddp._set_ddp_runtime_logging_sample_rate(1)


def reducing(ddp: DistributedDataParallel | None) -> Reducing | None:
    """Return what DDP measured of the last step; None where it did not."""
    if ddp is None or not hasattr(ddp, "_get_ddp_logging_data"):
        return None
    names = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")
    data = ddp._get_ddp_logging_data()
    times = [data.get(name) for name in names]
    if not all(isinstance(time, int) and time >= 0 for time in times) or not times[0]:
        return None
    forward, backward, comm, overlap = (time / 1e9 for time in times)
    return Reducing(forward + backward, max(0.0, comm - overlap))

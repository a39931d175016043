"""What DDP itself measures of a step. Its logging is private to torch: where it is missing or changed, nothing is known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from harness.training.parallel.strategy import StepTimes


def watch(ddp: DistributedDataParallel | None) -> None:
    """Have DDP measure every step, where it would one in a hundred."""
    if ddp is not None and hasattr(ddp, "_set_ddp_runtime_logging_sample_rate"):
        ddp._set_ddp_runtime_logging_sample_rate(1)


def reducing(ddp: DistributedDataParallel | None) -> StepTimes | None:
    """Return what DDP measured of the last step; None where it did not."""
    names = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")
    # Not all that DDP logs: the texts among it would take as long again, within the time of the next step.
    data = getattr(getattr(ddp, "logger", None), "_get_ddp_logging_data", lambda: None)()
    times = _seconds(getattr(data, "ints_map", {}), names)
    if not times or not times[0]:
        return None
    forward, backward, comm, overlap = times
    return StepTimes(forward + backward, max(0.0, comm - overlap))


def reduction(ddp: DistributedDataParallel | None) -> dict[str, Any]:
    """Return how a run's gradients travelled; empty where DDP does not tell.

    ``bucket_bytes`` are the buckets in the order in which they leave; ``comm_s`` is how long they travelled, in the mean over
    steps, and ``comm_overlap_s`` how much of that the backward hid.
    """
    data = _logged(ddp)
    times = _seconds(data, ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time"))
    # DDP puts its buckets in order after its first backward, and logs both orders.
    sizes = re.findall(r"\d+", str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes")))
    if not times or not sizes:
        return {}
    return {"bucket_bytes": [int(size) for size in sizes], "comm_s": times[0], "comm_overlap_s": times[1]}


def _logged(ddp: DistributedDataParallel | None) -> dict[str, Any]:
    return ddp._get_ddp_logging_data() if ddp is not None and hasattr(ddp, "_get_ddp_logging_data") else {}


def _seconds(data: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Return times that DDP logs in nanoseconds; empty where one is missing or none."""
    times = [data.get(name) for name in names]
    return [time / 1e9 for time in times if time is not None] if all(isinstance(t, int) and t >= 0 for t in times) else []

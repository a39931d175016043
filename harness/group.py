"""What ranks tell each other, where a group may be missing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def world_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 before initialisation and on a rank outside the group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return max(1, dist.get_world_size(group))


def all_gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return every rank's tensor of one shape, in rank order."""
    gathered = [torch.empty_like(tensor) for _ in range(world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered

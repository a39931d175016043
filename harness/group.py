"""What ranks tell each other, where a group may be missing."""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from harness.errors import Mismatch


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


def require_one_model(model: nn.Module, group: ProcessGroup | None) -> None:
    """See to it that all ranks have the same tensors, in the same order, with the same ones to train; collective.

    DDP compares the shapes of what is trained. A buffer of one rank alone leaves it waiting for the others for ever.

    Raises:
        Mismatch: They have not, on all ranks alike.
    """
    described: list[list[tuple[str, str]]] = [[]] * world_size(group)
    if len(described) == 1:
        return
    dist.all_gather_object(described, _described(model), group=group)
    rank, differing = next(((r, other) for r, other in enumerate(described) if other != described[0]), (0, described[0]))
    if rank:
        found = next(both for both in zip_longest(described[0], differing) if both[0] != both[1])
        said = f"The ranks do not have the same model: {_difference(*found, rank)}. Make it alike on all ranks."
        raise Mismatch(said, is_consequence=dist.get_rank(group) != rank)


def _described(model: nn.Module) -> list[tuple[str, str]]:
    kinds = ((name, "trained" if p.requires_grad else "frozen", p) for name, p in model.named_parameters())
    buffers = ((name, "a buffer", b) for name, b in model.named_buffers())
    return [(name, f"{kind} ({_shape(tensor)})") for name, kind, tensor in (*kinds, *buffers)]


def _shape(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "without a shape yet"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _difference(first: tuple[str, str] | None, other: tuple[str, str] | None, rank: int) -> str:
    if first is None or other is None:
        name, has, lacks = (other[0], rank, 0) if other is not None else (first[0] if first else "", 0, rank)
        return f"only rank {has} has '{name}', and rank {lacks} lacks it"
    if first[0] != other[0]:
        return f"rank {rank} has '{other[0]}' where rank 0 has '{first[0]}'"
    return f"'{first[0]}' is {first[1]} on rank 0 and {other[1]} on rank {rank}"

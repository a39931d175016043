"""What ranks tell each other, where a group may be missing."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from harness.errors import Mismatch

_held: list[Tensor] = []


def world_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 before initialisation and on a rank outside the group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    # torch says -1 to a rank outside the group.
    return max(1, dist.get_world_size(group))


def all_gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return every rank's tensor of one shape, in rank order."""
    gathered = [torch.empty_like(tensor) for _ in range(world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on all ranks; collective over the default group."""
    values = [value]
    if world_size(None) > 1:
        dist.broadcast_object_list(values, 0)
    return values[0]


def from_all(value: Any) -> list[Any]:
    """Return every rank's value, in rank order; collective over the default group."""
    values: list[Any] = [value] * world_size(None)
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def require_one_model(model: nn.Module, group: ProcessGroup | None) -> None:
    """See to it that all ranks have the same tensors, in the same order, with the same ones to train; collective.

    DDP compares the shapes of what is trained. A buffer of one rank alone leaves it waiting for the others for ever.

    Raises:
        Mismatch: They have not, on all ranks alike.
    """
    if world_size(group) == 1:
        return
    tensors = described_tensors(model)
    # Where the model lies: nccl sends from no other device.
    device = next(iter(model.parameters()), torch.empty(0)).device
    # A digest first: where all is right, 32 bytes travel, and the lists only where they differ.
    digest = torch.tensor(list(hashlib.sha256(repr(tensors).encode()).digest()), dtype=torch.uint8, device=device)
    # Held until the next time: a thread of gloo's that let go of them as the last one would want the interpreter's lock,
    # and a data worker that is forked just then never comes out of its fork.
    _held[:] = [digest, *all_gather(digest, group)]
    if all(torch.equal(digest, other) for other in _held[1:]):
        return
    described: list[list[tuple[str, str]]] = [[]] * world_size(group)
    dist.all_gather_object(described, tensors, group=group)
    rank, differing = next(((r, other) for r, other in enumerate(described) if other != described[0]), (0, described[0]))
    if rank:
        # Each rank finds the same pair in the same lists, so that all raise, and one of them as the cause.
        message = f"The ranks do not have the same model: {difference(described[0], differing, 'rank 0', f'rank {rank}')}."
        raise Mismatch(f"{message} Make it alike on all ranks.", is_consequence=dist.get_rank(group) != rank)


def described_tensors(model: nn.Module) -> list[tuple[str, str]]:
    """Return name and kind of each parameter, then of each buffer: whether it is trained, its type and shape."""
    kinds = ((name, "trained" if p.requires_grad else "frozen", p) for name, p in model.named_parameters())
    buffers = ((name, "a buffer", b) for name, b in model.named_buffers())
    return [(name, f"{kind} ({_shape(tensor)})") for name, kind, tensor in (*kinds, *buffers)]


def _shape(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "without a shape yet"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def difference(model: list[tuple[str, str]], other_model: list[tuple[str, str]], owner: str, other: str) -> str:
    """Return in words the first thing in which two models differ, which ``owner`` and ``other`` have."""
    entry, other_entry = next(both for both in zip_longest(model, other_model) if both[0] != both[1])
    if entry is None or other_entry is None:
        name, has, lacks = (other_entry[0], other, owner) if entry is None else (entry[0], owner, other)
        return f"only {has} has '{name}', and {lacks} lacks it"
    if entry[0] != other_entry[0]:
        return f"{other} has '{other_entry[0]}' where {owner} has '{entry[0]}'"
    return f"'{entry[0]}' is {entry[1]} on {owner} and {other_entry[1]} on {other}"

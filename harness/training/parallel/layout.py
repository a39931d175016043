"""What tells that a wrapped module has changed, so that what reduces its gradients no longer suits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup

from harness.training.parallel.collectives import world_size


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a reducer was built for; it has to be built anew when this changes."""

    world_size: int
    identities: tuple[int, ...]
    kinds: tuple[tuple[bool, torch.dtype, torch.device], ...]

    @classmethod
    def of(cls, model: nn.Module, group: ProcessGroup | None) -> Layout:
        """Return the layout of a model as it is now."""
        parameters = [p for p in collected(model, []) if p is not None]
        kinds = tuple((p.requires_grad, p.dtype, p.device) for p in parameters)
        return cls(world_size(group), tuple(map(id, parameters)), kinds)


def collected(module: nn.Module, parameters: list[nn.Parameter | None]) -> list[nn.Parameter | None]:
    """Return ``parameters`` and the module's, shared ones each time.

    Every forward asks, and ``parameters()`` is slow: so by the dictionaries in which torch's modules keep them.
    """
    parameters.extend(module._parameters.values())
    for child in module._modules.values():
        # torch keeps None for a part that was declared and is not there.
        if child is not None:
            collected(child, parameters)
    return parameters


def replaced_message(known: Mapping[str, nn.Parameter], present: Mapping[str, nn.Parameter]) -> str:
    """Return which parameters a wrapper lost sight of, and what to do instead."""
    names = sorted(name for name in known.keys() | present.keys() if known.get(name) is not present.get(name))
    shown = ", ".join(name.removeprefix("module.") for name in names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"Parameters were replaced, added or removed after DataParallel was built ({shown}): their gradients would not "
        "be averaged. Change the module first, then wrap it, DataParallel(model.module), and build the optimizer anew."
    )

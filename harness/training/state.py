"""Copies of a training's state, to go back to."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Of parameters; ``bfloat16`` keeps them in float32 and computes under autocast."""


@dataclass(frozen=True)
class TrainingState:
    """A copy of parameters, buffers and optimizer state."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> TrainingState:
        """Copy the state as it is now."""
        tensors = {name: tensor.detach().clone() for name, tensor in named_tensors(model)}
        # state_dict() refers to the optimizer's own tensors, which the next step changes in place.
        return cls(tensors, copy.deepcopy(optimizer.state_dict()["state"]))

    def restore(self, model: nn.Module) -> None:
        """Put the copy's parameters and buffers into ``model``, in the model's own precision."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Into the parameters that are there: the optimizer holds them, and so do hooks.
                parameter.copy_(self.model[name])
            _restore_buffers(model, self.model)


def _restore_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put buffers back, which forward may have made, replaced, grown or dropped since.

    A buffer whose elements share memory, as ``expand`` makes them, cannot be written: a new tensor takes its place.
    """
    # By the dictionary in which torch's modules keep them: only there can None be told from a buffer that is not there.
    restored: dict[int, Tensor | None] = {}
    for path, module in model.named_modules():
        for key, present in module._buffers.items():
            if present is not None and id(present) in restored:
                # One buffer under two names stays one.
                module._buffers[key] = restored[id(present)]
                continue
            value = values.get(f"{path}.{key}" if path else key)
            if present is not None and value is not None and present.shape == value.shape and not _is_expanded(present):
                present.copy_(value)
            else:
                like = value if present is None else present
                module._buffers[key] = None if value is None or like is None else value.to(like, copy=True)
            if present is not None:
                restored[id(present)] = module._buffers[key]


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several of a tensor's elements lie at one place in memory."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters, then buffers, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def in_precision(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the model on a device, in a floating-point type; complex buffers keep both their parts, each in that type."""
    # Module.to() would cast complex buffers to the real type, and drop what is imaginary.
    pairs = [(m, key, b) for m in model.modules() for key, b in m._buffers.items() if b is not None and b.is_complex()]
    for module, key, _ in pairs:
        module._buffers[key] = None
    model = model.to(device, dtype)
    for module, key, buffer in pairs:
        module._buffers[key] = buffer.to(device, dtype.to_complex())
    return model


def widened(recipe: Any) -> Any:
    """Return a copy of a recipe whose own tensors and modules, the weights of a loss say, are in float64."""
    # The recipe itself goes on in the run's precision.
    wide = copy.copy(recipe)
    for name, value in vars(recipe).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            setattr(wide, name, value.double())
        elif isinstance(value, nn.Module):
            setattr(wide, name, copy.deepcopy(value).double())
    return wide


def random_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, that of the current CUDA device among them."""
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    # To ask for the state of a device that nobody has used would start CUDA in this process.
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go back to states that :func:`random_states` returned."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    # A checkpoint is read onto the rank's device, but generators take their states from the CPU.
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu())


@contextmanager
def undisturbed_random() -> Iterator[None]:
    """Leave all generators as they were found."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)

"""Optimizers: torch's own, one as users write them, and two that are wrong on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
"""As many scripts read it: once, when the module is imported."""


class Lion(Optimizer):
    """X. Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), as people copy it."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * (average * first + p.grad * (1 - first)).sign())
                average.mul_(second).add_(p.grad, alpha=1 - second)


class Langevin(optim.SGD):
    """SGD with noise that each rank draws for itself: the ranks part."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p), alpha=1e-4)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _muon(model: nn.Module) -> Optimizer:
    # torch's Muon takes matrices alone; two optimizers at once are another matter.
    matrices = [p for p in _trainable(model) if p.ndim == 2]
    for p in model.parameters():
        p.requires_grad_(any(p is matrix for matrix in matrices))
    return optim.Muon(matrices, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: optim.SGD(_trainable(model), lr=0.1),
    "momentum": lambda model: optim.SGD(_trainable(model), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda model: optim.Adam(_trainable(model), lr=1e-3),
    "AdamW": lambda model: optim.AdamW(_trainable(model), lr=1e-3, amsgrad=True),
    "Adamax": lambda model: optim.Adamax(_trainable(model)),
    "NAdam": lambda model: optim.NAdam(_trainable(model)),
    "RAdam": lambda model: optim.RAdam(_trainable(model)),
    "RMSprop": lambda model: optim.RMSprop(_trainable(model), lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda model: optim.Adagrad(_trainable(model)),
    "Adadelta": lambda model: optim.Adadelta(_trainable(model)),
    "ASGD": lambda model: optim.ASGD(_trainable(model)),
    "Rprop": lambda model: optim.Rprop(_trainable(model), lr=1e-3),
    "Adafactor": lambda model: optim.Adafactor(_trainable(model)),
    "Muon": _muon,
    "Lion": lambda model: Lion(_trainable(model)),
    "Langevin": lambda model: Langevin(_trainable(model), lr=0.1),
    "lr times ranks, read at import": lambda model: optim.SGD(_trainable(model), lr=0.1 * RANKS),
    "lr times ranks, read when made": lambda model: optim.SGD(
        _trainable(model), lr=0.1 * int(os.environ.get("WORLD_SIZE", "1"))
    ),
}

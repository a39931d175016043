"""A small recipe whose optimizer and normalisation can be chosen, for the correct runs of the fault table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from recipes.mnist import Mnist

_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3, amsgrad=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
}


class Digits(Mnist):
    """The digits, with the optimizer of that name, and BatchNorm or not."""

    def __init__(self, optimizer: str = "SGD", norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__(width=4, hidden=16, dropout=dropout)
        self._name, self._norm = optimizer, norm

    def model(self) -> nn.Module:
        model: Any = super().model()
        if self._norm:
            model.conv2 = nn.Sequential(model.conv2, nn.BatchNorm2d(8))
            model.hidden = nn.Sequential(model.hidden, nn.BatchNorm1d(16))
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        # Two groups, of which the second has another learning rate, as biases often have.
        named = list(model.named_parameters())
        groups = [[p for name, p in named if not name.endswith("bias")], [p for name, p in named if name.endswith("bias")]]
        made = _OPTIMIZERS[self._name]([{"params": group} for group in groups])
        made.param_groups[1]["lr"] *= 2
        return made

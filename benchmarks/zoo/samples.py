"""Small data sets that are the same on every rank, and the recipe that all of the zoo share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from benchmarks.zoo.optimizers import OPTIMIZERS

CLASSES, FEATURES, SAMPLES = 4, 12, 64
TOKENS, LENGTH, IGNORED = 40, 12, -100


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors() -> TensorDataset:
    """Return (features, class) pairs whose classes are not equally frequent."""
    x = torch.randn(SAMPLES, FEATURES, generator=generator())
    y = (torch.rand(SAMPLES, generator=generator(1)).square() * CLASSES).long()
    return TensorDataset(x, y)


def images() -> TensorDataset:
    """Return (image [3, 32, 32], class) pairs."""
    x = torch.randn(SAMPLES, 3, 32, 32, generator=generator())
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator(1))
    return TensorDataset(x, y)


def sentences(even: bool = False) -> TensorDataset:
    """Return (tokens, mask, labels), [12] each; of uneven lengths, labels are ignored behind the end."""
    tokens = torch.randint(3, TOKENS, (SAMPLES, LENGTH), generator=generator())
    lengths = torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator(1))
    inside = torch.arange(LENGTH) < (torch.full_like(lengths, LENGTH) if even else lengths)
    return TensorDataset(torch.where(inside, tokens, 0), inside.long(), torch.where(inside, tokens, IGNORED))


def sounds() -> TensorDataset:
    """Return (wave [800], labels [5]) pairs; of a transcript's labels the last ones may be ignored."""
    labels = torch.randint(1, 8, (SAMPLES, 5), generator=generator())
    lengths = torch.randint(2, 6, (SAMPLES, 1), generator=generator(1))
    return TensorDataset(
        torch.randn(SAMPLES, 800, generator=generator(2)), torch.where(torch.arange(5) < lengths, labels, IGNORED)
    )


class ZooRecipe:
    """What recipes of the zoo share: an optimizer by its name.

    Args:
        optimizer: One of OPTIMIZERS.
    """

    samples: Callable[[], Dataset[Any]] = staticmethod(vectors)

    def __init__(self, optimizer: str = "SGD") -> None:
        self._optimizer = optimizer

    def dataset(self) -> Dataset[Any]:
        return type(self).samples()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return OPTIMIZERS[self._optimizer](model)

    def model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        raise NotImplementedError

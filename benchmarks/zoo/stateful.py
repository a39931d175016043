"""Recipes that keep, draw or read something beside model and batch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.zoo.losses import Classifier
from benchmarks.zoo.samples import CLASSES, FEATURES, SAMPLES, generator, vectors


class Noisy(Dataset[Any]):
    """Adds noise to each sample when it is read.

    Args:
        source: ``own``: of a generator that every rank seeds alike; ``common``: of torch's; ``number``: of the sample's number.
    """

    def __init__(self, source: str) -> None:
        self._samples, self._source, self._own = vectors(), source, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        x, y = self._samples[number]
        if self._source == "own":
            noise = torch.from_numpy(self._own.standard_normal(FEATURES, dtype=np.float32))
        elif self._source == "common":
            noise = torch.randn(FEATURES)
        else:
            noise = torch.randn(FEATURES, generator=generator(number))
        return x + 0.1 * noise, y


class Augmented(Classifier):
    """Noise in the data set."""

    def __init__(self, source: str = "common", **settings: Any) -> None:
        super().__init__(**settings)
        self._source = source

    def dataset(self) -> Dataset[Any]:
        return Noisy(self._source)


class Scaled(Classifier):
    """Divides the loss by a running mean of the losses that this rank has seen."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._mean = 1.0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        self._mean = 0.9 * self._mean + 0.1 * float(loss.detach())
        return loss / self._mean


class Counted(Classifier):
    """Warms a term of the loss up by counting its own calls, which are as many on every rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._calls += 1
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + min(1.0, self._calls / 100) * logits.square().mean()


class OwnShard(Classifier):
    """Splits the data by RANK itself, as for a loop that does not."""

    def dataset(self) -> Dataset[Any]:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return torch.utils.data.Subset(vectors(), range(rank, SAMPLES, ranks))


class ScaledBatch(Classifier):
    """Weighs the loss by how many samples a rank would have of 16, as a script that knows its batch size does."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 8


class FirstRank(Classifier):
    """A term that only rank 0 adds, as for a regulariser "that need not be computed twice"."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        penalty = sum(p.square().sum() for p in model.parameters())
        return loss + 1e-3 * penalty if os.environ.get("RANK", "0") == "0" else loss


class Distilled(Classifier):
    """Learns what a frozen teacher says."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._teacher = nn.Linear(FEATURES, CLASSES)
        with torch.no_grad():
            self._teacher.weight.copy_(torch.randn(CLASSES, FEATURES, generator=generator(2)))
            self._teacher.bias.zero_()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self._teacher.to(batch[0].dtype)(batch[0]).softmax(1)
        return F.kl_div(model(batch[0]).log_softmax(1), target, reduction="batchmean")

"""Small recipes, of which every value is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR
from torch.utils.data import Dataset, TensorDataset, default_collate


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def my_rank() -> int:
    """Return this process's rank, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


class Points:
    """A small network from 4 numbers to 1; the loss is the mean over samples."""

    def __init__(
        self,
        count: int = 18,
        optimizer: str = "sgd",
        batch_norm: bool = False,
        dropout: float = 0.0,
        bad: Sequence[int] = (),
        badness: str = "nan",
        dtype: str = "float64",
    ) -> None:
        self.count, self.kind, self.batch_norm, self.dropout = count, optimizer, batch_norm, dropout
        self.bad, self.badness, self.dtype = set(bad), badness, getattr(torch, dtype)

    def dataset(self) -> Dataset[Any]:
        ids, x = torch.arange(self.count), numbers(self.count, 4).to(self.dtype)
        if self.badness == "input":
            x[list(self.bad)] = torch.nan
        return TensorDataset(ids, x, numbers(self.count, seed=1).to(self.dtype))

    def model(self) -> nn.Module:
        middle: nn.Module = nn.BatchNorm1d(5) if self.batch_norm else nn.Tanh()
        return nn.Sequential(nn.Linear(4, 5), middle, nn.Dropout(self.dropout), nn.Linear(5, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.kind == "adam":
            return Adam(model.parameters(), lr=0.01, weight_decay=0.1)
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        ids, x, y = batch
        loss = F.mse_loss(model(x).squeeze(1), y)
        if self.bad.isdisjoint(ids.tolist()) or self.badness == "input":
            return loss
        if self.badness == "hidden":
            # NaN, of which no gradient of the model's tells.
            return F.relu(model(x) - 1e9).sum() + torch.tensor(torch.nan)
        return {"nan": loss * torch.nan, "inf": loss + torch.inf, "gradient": loss + (model(x) * 0).sum().sqrt()}[self.badness]

    def eval_dataset(self) -> Dataset[Any]:
        return self.dataset()

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        _, x, y = batch
        return {"loss": (F.mse_loss(model(x).squeeze(1), y, reduction="sum"), len(y))}


class Scheduled(Points):
    """With a scheduler that asks for the number of steps."""

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 - step / (2 * num_steps))


class ScheduledAlone(Points):
    """With a scheduler that does not, but has an option of its own."""

    def scheduler(self, optimizer: Optimizer, every: int = 2) -> LRScheduler:
        return StepLR(optimizer, every, gamma=0.5)


class Sorted(Points):
    """One batch an epoch, in the order of the samples: only the last two of five have a gradient, of -400 each."""

    def dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(5, 1, dtype=torch.float64), torch.tensor([0, 0, 0, 200, 200], dtype=torch.float64))

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    def batches(self, order: Sequence[int], batch_size: int) -> list[list[int]]:
        return [sorted(order)]


@dataclass(frozen=True)
class Box:
    """A batch that nobody may change."""

    inner: list[Labelled]


@dataclass
class Labelled:
    """What is in a box, in single precision; ``__init__`` does not take all of it."""

    x: Tensor
    y: Tensor
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weights = torch.ones(len(self.y))

    @cached_property
    def targets(self) -> Tensor:
        return self.y * self.weights


class Boxed(Points):
    """Points whose batches are dataclasses in a list in a frozen dataclass."""

    def collate(self, samples: list[Any]) -> Box:
        _, x, y = default_collate(samples)
        return Box([Labelled(x.float(), y.float())])

    def loss(self, model: nn.Module, batch: Box) -> Tensor:
        (content,) = batch.inner
        return F.mse_loss(model(content.x).squeeze(1), content.targets)

    def evaluate(self, model: nn.Module, batch: Box) -> dict[str, Any]:
        return {"loss": (self.loss(model, batch) * len(batch.inner[0].y), len(batch.inner[0].y))}


class Tokens:
    """Sequences of different lengths; the loss is (sum over tokens, number of tokens).

    Args:
        lengths: Of each sequence; a token is a word of a vocabulary of 20.
        table: ``sparse``, ``dense`` or ``bag``: how words become vectors.
    """

    def __init__(self, lengths: Sequence[int] = (30, 3), table: str = "dense", in_order: bool = False) -> None:
        self.lengths, self.table, self.in_order = list(lengths), table, in_order

    def dataset(self) -> Dataset[Any]:
        draw = torch.Generator().manual_seed(3)
        return _Listed([torch.randint(1, 20, (length,), generator=draw) for length in self.lengths])

    def collate(self, samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def model(self) -> nn.Module:
        return _Words(self.table)

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.table == "dense":
            return Adam(model.parameters(), lr=0.01)
        return _Both([SparseAdam([model.table.weight], lr=0.01), Adam(model.out.parameters(), lr=0.01)])

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        real = batch != 0
        losses = model(batch).square()
        return losses[real].sum(), real.sum()

    def batches(self, order: Sequence[int], batch_size: int) -> list[list[int]]:
        """Return batches of at most 40 tokens, so of different numbers of samples."""
        if self.in_order:
            return [sorted(order)[start : start + batch_size] for start in range(0, len(order), batch_size)]
        batches: list[list[int]] = [[]]
        for number in order:
            if sum(self.lengths[other] for other in batches[-1]) + self.lengths[number] > 40:
                batches.append([])
            batches[-1].append(number)
        random.shuffle(batches)
        return batches


class _Listed(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]


class _Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        make = nn.EmbeddingBag if kind == "bag" else nn.Embedding
        self.table = make(20, 3, sparse=kind != "dense")
        self.out = nn.Linear(3, 1)

    def forward(self, words: Tensor) -> Tensor:
        vectors = self.table(words.reshape(-1, 1)).reshape(*words.shape, 3) if self.kind == "bag" else self.table(words)
        return self.out(vectors).squeeze(-1)


class _Both(Optimizer):
    """Two optimizers as one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


class Branches(Points):
    """Of two heads, each step uses that of its first sample; weight decay moves what has a gradient, if only of zeros."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(4, 3), "even": nn.Linear(3, 1), "odd": nn.Linear(3, 1)})

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=0.01, weight_decay=0.1)

    def batches(self, order: Sequence[int], batch_size: int) -> list[list[int]]:
        odd, even = [n for n in order if n % 2], [n for n in order if n % 2 == 0]
        return [part[start : start + batch_size] for part in (even, odd) for start in range(0, len(part), batch_size)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        ids, x, y = batch
        head = model["odd" if ids[0] % 2 else "even"]
        return F.mse_loss(head(model["body"](x)).squeeze(1), y)


class Digits:
    """Sixteen samples to train on, and ten to evaluate on, of which all but number 0 are classified right."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(16))

    def model(self) -> nn.Module:
        model = nn.BatchNorm1d(1)
        model.register_buffer("mask", torch.tensor([[True, False], [True, True]]).T)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0].to(model.weight.dtype).unsqueeze(1)).square().mean()

    def eval_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(self.count))

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        random.random(), numpy.random.rand(), torch.rand(1)
        ids = batch[0]
        shifted = model(ids.to(model.weight.dtype).unsqueeze(1)).sum()
        found = {"accuracy": ((ids != 0).sum(), len(ids)), "shifted": (shifted, len(ids))}
        return found | ({"of nine": (9.0, 1)} if 9 in ids else {})


class Noise(Points):
    """Samples that are drawn anew each time."""

    def dataset(self) -> Dataset[Any]:
        return _Drawn(self.count)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch.repeat(1, 4)).square().mean()


class _Drawn(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([random.random() + numpy.random.rand()], dtype=torch.float64) + torch.rand(1, dtype=torch.float64)


class Forgetful(Points):
    """With an optimizer whose momentum no checkpoint holds."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return _Forgetful(model.parameters(), lr=0.1)


class _Forgetful(SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.momenta: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.momenta[p] = self.momenta.get(p, torch.zeros_like(p)).mul(0.9).add(p.grad)
                p.sub_(self.momenta[p], alpha=group["lr"])


class Drifting(Points):
    """Goes wrong on rank 1 alone, in the sixth step of a training: after the steps that are verified."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return _Drifting(model.parameters(), lr=0.1)


class _Drifting(SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.taken += 1
        if self.taken == 6 and dist.is_initialized() and dist.get_rank() == 1:
            self.param_groups[0]["params"][0].mul_(1 + 1e-12)

"""Networks from vectors [n, 12] to logits [n, 4], with layers that keep, draw, share or freeze something."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 16


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, WIDTH), *between, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


class Averaged(nn.Module):
    """Keeps a moving average of its weights in buffers, and is drawn towards what the average says (BYOL, mean teacher)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.average = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.average.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            target = self.average(x)
        logits = self.student(x)
        return cast(Tensor, logits + 0.1 * (logits - target).square())


class AverageInBuffers(nn.Module):
    """Averages its weights in buffers; nothing reads them in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.average: Tensor
        self.register_buffer("average", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = torch.lerp(self.average, cast(Tensor, self.body[-1].weight).detach(), 0.1)
        return cast(Tensor, self.body(x))


class Quantised(nn.Module):
    """The nearest of eight vectors goes on, straight through; they learn by gradients, or from the rank's samples."""

    def __init__(self, by_samples: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 4)
        self.by_samples = by_samples
        book = torch.randn(8, WIDTH)
        if by_samples:
            self.register_buffer("book", book)
        else:
            self.book = nn.Parameter(book)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.book).argmin(1)
        code = self.book[nearest]
        if self.by_samples and self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 8).to(z.dtype)
                means = chosen.T @ z / chosen.sum(0).clamp(min=1)[:, None]
                self.book.lerp_(torch.where(chosen.any(0)[:, None], means, self.book), 0.1)
        pulled = (z - code).square().mean(1, keepdim=True)
        return cast(Tensor, self.decoder(z + (code - z).detach()) + pulled)


class StochasticDepth(nn.Module):
    """Leaves a layer out for half of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        kept = torch.bernoulli(torch.full((len(x), 1), 0.5, dtype=x.dtype, device=x.device)) if self.training else 0.5
        return cast(Tensor, self.last(x + kept * self.middle(x).relu()))


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.body.requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.body(x) + self.up(self.down(x)))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Adversarial(nn.Module):
    """Two losses at once: a head learns what the body unlearns, by a gradient that is turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.critic = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x).tanh()
        return cast(Tensor, self.head(z) + 0.3 * self.critic(_Reversed.apply(z)))  # type: ignore[no-untyped-call]


class Uncertain(nn.Module):
    """Two tasks, whose weights are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tasks = nn.Linear(12, WIDTH), nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x).relu()
        return sum((task(z) * (-v).exp() + v for task, v in zip(self.tasks, self.log_variances, strict=True)), torch.zeros(()))


class Tied(nn.Module):
    """The last layer is the first one's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(12, WIDTH), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).relu(), self.first.weight.T[:4], self.bias)


class Checkpointed(nn.Module):
    """Forgets its activations, and computes them again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.use_reentrant = nn.Linear(12, 12), mlp(nn.Dropout(0.2)), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant))


class Tables(nn.Module):
    """The signs of the features are looked up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(24, WIDTH, sparse=sparse), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.table((x > 0).long() + torch.arange(0, 24, 2, device=x.device)).mean(1)))


class Recurrent(nn.Module):
    """Reads the features one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.LSTM(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.body(x[..., None])[0][:, -1]))


class Variational(nn.Module):
    """Draws between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.last = nn.Linear(12, WIDTH), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.mean(x), self.spread(x)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return cast(Tensor, self.last(z) + 0.01 * (mean.square() + spread.exp() - spread).mean(1, keepdim=True))


class Centred(nn.Module):
    """Subtracts a running mean of the rank's own samples, in training too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = torch.lerp(self.mean, x.detach().mean(0), 0.1)
        return cast(Tensor, self.body(x - self.mean))


class ByBatchSize(nn.Module):
    """Divides by the size of the batch that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.body(x / len(x)))


class Attentive(nn.Module):
    """Samples look at each other, as a set transformer's or a forgotten ``batch_first`` make them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(12, WIDTH), nn.MultiheadAttention(WIDTH, 2), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)[:, None]
        return cast(Tensor, self.last(self.attention(z, z, z, need_weights=False)[0][:, 0]))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropout": lambda: mlp(nn.Dropout(0.3)),
    "layer norm": lambda: mlp(nn.LayerNorm(WIDTH)),
    "batch norm": lambda: mlp(nn.BatchNorm1d(WIDTH)),
    "spectral norm": lambda: mlp(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "old spectral norm": lambda: mlp(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "weight norm": lambda: mlp(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "mean teacher": Averaged,
    "average of weights": AverageInBuffers,
    "codes by gradient": lambda: Quantised(False),
    "codes by samples": lambda: Quantised(True),
    "stochastic depth": StochasticDepth,
    "adapters": Adapted,
    "adversarial": Adversarial,
    "learnt task weights": Uncertain,
    "tied": Tied,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "table": lambda: Tables(False),
    "sparse table": lambda: Tables(True),
    "LSTM": Recurrent,
    "variational": Variational,
    "running mean of samples": Centred,
    "divided by batch size": ByBatchSize,
    "attention over the batch": Attentive,
}

"""Losses of one network, as they are found in the wild: means that are means, and means that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.networks import NETWORKS
from benchmarks.zoo.samples import CLASSES, ZooRecipe

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]

_WEIGHTS = (1.0, 2.0, 3.0, 5.0)


def _weights(like: Tensor) -> Tensor:
    return like.new_tensor(_WEIGHTS)


def _weighted(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(x)
    weights = _weights(logits)
    return F.cross_entropy(logits, y, weights, reduction="sum"), weights[y].sum()


def _focal_items(logits: Tensor, y: Tensor) -> Tensor:
    entropy = F.cross_entropy(logits, y, reduction="none")
    return (1 - (-entropy).exp()).square() * entropy


def _mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    share, order = torch.rand((), dtype=x.dtype, device=x.device), torch.randperm(len(x), device=x.device)
    target = F.one_hot(y, CLASSES).to(x.dtype)
    return torch.lerp(x, x[order], share), torch.lerp(target, target[order], share)


def _triplet(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    # The hardest positive and negative of each anchor, looked for in what the rank has.
    z = model(x)
    distances = (z[:, None] - z[None]).square().sum(-1)
    same = y[:, None] == y[None]
    hardest = distances.masked_fill(~same, 0).amax(1) - distances.masked_fill(same, 1e3).amin(1)
    return F.relu(hardest + 1).mean()


def _contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    views = F.normalize(model(x), dim=1), F.normalize(model(x * 0.9 + 0.1), dim=1)
    return F.cross_entropy(views[0] @ views[1].T / 0.1, torch.arange(len(x), device=x.device))


def _decorrelated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (len(z) - 1)
    return F.cross_entropy(z, y) + (covariance - torch.diag(covariance.diagonal())).square().sum()


def _dice(model: nn.Module, x: Tensor, y: Tensor, over: tuple[int, ...]) -> Tensor:
    share, target = model(x).softmax(1), F.one_hot(y, CLASSES)
    return (1 - 2 * (share * target).sum(over) / (share.square() + target).sum(over)).mean()


def _of_one_kind(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = (y < 2).to(x.dtype)
    return (F.cross_entropy(model(x), y, reduction="none") * first).sum(), first.sum()


def _ratio(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] / pair[1].clamp(min=1)


def _gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    logits = model(x)
    (slope,) = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + (slope.norm(dim=1) - 1).square().mean()


def _advantage(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    reward = x[:, 0]
    normalised = (reward - reward.mean()) / (reward.std() + 1e-8)
    return (F.cross_entropy(model(x), y, reduction="none") * normalised).mean()


def _balanced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(model(x), y, (len(y) / counts).to(x.dtype))


def _entropy_of_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    mean = logits.softmax(1).mean(0)
    return F.cross_entropy(logits, y) + 0.1 * (mean * mean.log()).sum()


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _items(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda model, x, y: F.cross_entropy(model(x), y),
    "label smoothing": lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
    "weighted sum and weights": _weighted,
    "weighted mean": lambda model, x, y: F.cross_entropy(model(x), y, x.new_tensor(_WEIGHTS)),
    "focal": lambda model, x, y: _focal_items(model(x), y).mean(),
    "focal by positives": lambda model, x, y: _focal_items(model(x), y).sum() / (y > 0).sum().clamp(min=1),
    "mixup": lambda model, x, y: F.cross_entropy(model((mixed := _mixed(x, y))[0]), mixed[1]),
    "sum": lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"),
    "times ranks": lambda model, x, y: F.cross_entropy(model(x), y) * _ranks(),
    "root of the mean square": lambda model, x, y: (model(x) - F.one_hot(y, CLASSES)).square().mean().sqrt(),
    "hardest half": lambda model, x, y: _items(model, x, y).topk(max(1, len(x) // 2)).values.mean(),
    "median": lambda model, x, y: _items(model, x, y).median(),
    "triplet of the hardest": _triplet,
    "contrastive in the batch": _contrastive,
    "decorrelated": _decorrelated,
    "entropy of the mean": _entropy_of_mean,
    "dice of each sample": lambda model, x, y: _dice(model, x, y, (1,)),
    "dice of the batch": lambda model, x, y: _dice(model, x, y, (0,)),
    "balanced by the batch": _balanced,
    "one kind, sum and count": _of_one_kind,
    "one kind, mean": lambda model, x, y: _ratio(_of_one_kind(model, x, y)),
    "gradient penalty": _gradient_penalty,
    "normalised advantage": _advantage,
    "sampled negatives": lambda model, x, y: F.margin_ranking_loss(
        (z := model(x)).gather(1, y[:, None]),
        z.gather(1, torch.randint(CLASSES, (len(y), 1), device=y.device)),
        torch.ones_like(z[:, :1]),
    ),
    "mean square of float32 constants": lambda model, x, y: (
        (model(x) - torch.eye(CLASSES, dtype=torch.float32, device=x.device)[y]).square().mean()
    ),
}


class Classifier(ZooRecipe):
    """A small network with a loss, both by name."""

    def __init__(self, loss: str = "cross entropy", network: str = "mlp", optimizer: str = "SGD") -> None:
        super().__init__(optimizer)
        self._loss, self._network = LOSSES[loss], NETWORKS[network]

    def model(self) -> nn.Module:
        return self._network()

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        return self._loss(model, *batch)

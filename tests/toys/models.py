"""Recipes whose model is wrong in a user's way, or right in an unusual one."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from harness.training.parallel.batchnorm import SyncBatchNorm
from tests import toys
from tests.toys import my_rank


class PlainAttribute(nn.Module):
    """Normalises by a running mean that it registers nowhere: in training, or only in evaluation."""

    def __init__(self, in_training):
        super().__init__()
        self.linear, self.in_training = nn.Linear(4, 1), in_training
        self.mean = torch.zeros(4)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean if self.in_training or not self.training else x)


class HiddenStatistics(toys.Points):
    def __init__(self, in_training, **settings):
        super().__init__(**settings)
        self.in_training = in_training

    def model(self):
        return PlainAttribute(self.in_training)


class OwnSyncBatchNorm(toys.Points):
    """Synchronises its BatchNorm itself, or one of two such layers."""

    def __init__(self, layers, **settings):
        super().__init__(**settings)
        self.layers = layers

    def model(self):
        second = SyncBatchNorm(5) if self.layers == 2 else nn.BatchNorm1d(5)
        return nn.Sequential(nn.Linear(4, 5), SyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 5), second, nn.Linear(5, 1))


class InPairs(toys.Points):
    """Synchronises its BatchNorm among two ranks each."""

    pairs: ClassVar[list[dist.ProcessGroup]] = []

    def model(self):
        layer = SyncBatchNorm(5, group=self.pairs[my_rank() // 2])
        return nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 1))


class HoldsALock(toys.Points):
    """Has a model that cannot be copied."""

    def model(self):
        model = super().model()
        model.lock = threading.Lock()
        return model


class BiasBeforeBatchNorm(toys.Points):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Normed(toys.Points):
    """Each forward takes a step towards the weight's norm, and leaves it in buffers."""

    def __init__(self, old: bool = False, **settings):
        super().__init__(**settings)
        self.old = old

    def model(self):
        model = super().model()
        (nn.utils if self.old else parametrizations).spectral_norm(model[0])
        return model


class Codes(nn.Module):
    """Keeps a mean of what it has seen, and adds it to what it returns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.seen = self.seen.lerp(x.detach().mean(0).to(self.seen), 0.1)
        return x + self.seen.detach()


class Remembering(toys.Points):
    def model(self):
        model = super().model()
        return nn.Sequential(model[0], model[1], Codes(), model[-1])


class Teacher(nn.Module):
    """Learns from a slow copy of itself, which each forward moves."""

    def __init__(self):
        super().__init__()
        self.own, self.slow = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x):
        if not self.training:
            return self.own(x) + self.slow(x)
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.own.parameters(), strict=True):
                slow.lerp_(own, 0.1)
            self.own.bias.data.clamp_(-0.1, 0.1)
        return self.own(x) + self.slow(x)


class Taught(toys.Points):
    def model(self):
        return Teacher()


class Rotated(nn.Linear):
    """Turns what it sees by a complex buffer, and makes and grows others."""

    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.arange(2.0)))
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("made", None)

    def forward(self, x):
        assert self.turn.is_complex()
        self.grown = torch.cat([self.grown, torch.ones(1)])
        self.made = torch.ones(1) if self.made is None else self.made
        turned = torch.view_as_complex(x.reshape(-1, 2, 2).contiguous()) * self.turn
        return super().forward(torch.view_as_real(turned).flatten(1)) * self.made.to(x)


class Turning(toys.Points):
    def model(self):
        return Rotated()


class InstanceNormed(toys.Points):
    def model(self):
        layer = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Unflatten(1, (2, 2)), layer, nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 1))


class KeepsNoStatistics(toys.Points):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 1))


class Keeping(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[2].eval()
        return self


class KeepsEvaluating(toys.Points):
    def model(self):
        return Keeping(*super().model())


class WithEmptyParameter(toys.Points):
    def model(self):
        model = super().model()
        model.empty = nn.Parameter(torch.zeros(0))
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) + model.empty.sum()


class CancelsOut(toys.Points):
    """Has a loss that is small against what it is the difference of."""

    def dataset(self):
        ids, x, _ = super().dataset().tensors
        return TensorDataset(ids, x, (1998 + 10 * x[:, 0]).round())

    def model(self):
        model = super().model()
        nn.init.constant_(model[3].bias, 1998.0)
        return model


class CentredOnItsOwn(toys.Points):
    """Keeps a mean of what its rank has seen, and reduces it over ranks, or not."""

    def __init__(self, reduced, **settings):
        super().__init__(**settings)
        self.reduced = reduced

    def model(self):
        model = super().model()
        model.register_buffer("centre", torch.zeros(()))
        return model

    def loss(self, model, batch):
        _ids, x, y = batch
        out = model(x).squeeze(1)
        loss = F.mse_loss(out, y - model.centre)
        with torch.no_grad():
            seen = torch.stack([out.sum(), torch.tensor(float(len(out)), dtype=out.dtype)])
            if self.reduced:
                all_reduce(seen)
            model.centre.mul_(0.9).add_(0.1 * seen[0] / seen[1])
        return loss


class FreezesInOptimizer(toys.Points):
    def optimizer(self, model):
        model[0].requires_grad_(False)
        return SGD(model[3].parameters(), lr=0.05)


class Shared(toys.Points):
    """Uses layers twice, with checkpoints that call forward again."""

    def loss(self, model, batch):
        _ids, x, y = batch
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda v: model[1](model[0](v))[:, :4], x, use_reentrant=True)
        return F.mse_loss(model[3](F.pad(x, (0, 1))).squeeze(1), y)


class PeersAsked(toys.Points):
    """Has a synchronised layer of torch's."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 5), nn.SyncBatchNorm(5), nn.Linear(5, 1))

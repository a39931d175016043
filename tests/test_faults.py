"""Every fault is caught at its smallest size, and so is what a user's own code does wrong; correct runs are not accused."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed import all_reduce, get_world_size
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from harness.compare.detection import audit_lines, audit_table, trials_of
from harness.errors import Mismatch
from harness.run.faults import FAULTS
from harness.run.folder import RunDir
from harness.run.plan import Ddp, TrainPlan
from harness.train import prepare
from harness.training.parallel.batchnorm import SyncBatchNorm
from harness.training.parallel.batchnorm_messages import Collective, exchanging
from harness.training.recipe import make_recipe
from harness.training.trainer import Trainer
from harness.verify import audit as audits
from harness.verify.audit import Trials
from harness.verify.faults.inject import inject
from harness.verify.faults.seams import INJECTIONS, DoesNotApply
from harness.verify.reference.batchnorm import NEEDS_PEERS
from harness.verify.reference.reference import Reference
from tests import toys
from tests.ranks import Outcomes, groups_of

CONF = Path(__file__).parents[1] / "conf"
SIZES = (2, 3, 4)
WHOLE = {"_target_": "tests.toys.Scheduled", "count": 51, "batch_norm": True, "dropout": 0.3, "dtype": "float32"}
TOKENS = {"_target_": "tests.toys.Tokens", "lengths": [5, 3, 4, 2, 6, 3, 5, 4, 2, 3, 4, 5, 6, 2, 3, 4, 5, 2], "table": "sparse"}
BATCH = 17  # 2, 3 and 4 ranks get shards of unequal size
NEEDS = {
    "accumulation_without_divisor": {"grad_accumulation": 2},
    "clipped_before_reduction": {"clip_norm": 0.05},
    "sparse_rows_lost": {"recipe": TOKENS, "global_batch_size": 6},
}

WITH_SYNC_BN = (
    "stale_buffers",
    "accumulation_without_divisor",
    "zero_grad_forgotten",
    "clipped_before_reduction",
    "bit_flipped_in_compute",
    "same_dropout_everywhere",
)
"""Faults that the replay of a single rank shows."""


def plan_of(**settings):
    return TrainPlan(**{"recipe": WHOLE, "global_batch_size": BATCH, "steps": 8, **settings})


# --- what a user's own code does wrong -------------------------------------------------------------------------------


def my_rank():
    return dist.get_rank() if dist.is_initialized() else 0


class Hooked(toys.Points):
    """Scales one gradient by a hook, on the ranks that are named, by one part in a million."""

    def __init__(self, ranks, **settings):
        super().__init__(**settings)
        self.ranks, self.handles = ranks, []

    def loss(self, model, batch):
        for handle in self.handles:
            handle.remove()
        self.handles = [model[0].weight.register_hook(lambda g: g * (1 + 1e-6))] if my_rank() in self.ranks else []
        return super().loss(model, batch)


class OtherOptimizer(toys.Points):
    """Gives rank 1 another momentum."""

    def optimizer(self, model):
        return SGD(model.parameters(), lr=0.1, momentum=0.9 if my_rank() == 0 else 0.90001)


class OtherData(toys.Points):
    """Has one number of one sample different on rank 1."""

    def dataset(self):
        dataset = super().dataset()
        if my_rank() == 1:
            dataset.tensors[1][:, 0] += 1e-6
        return dataset


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


class NotInOptimizer(toys.Points):
    """Forgets the last bias: so does the reference, whose optimizer is the same."""

    def optimizer(self, model):
        return SGD(list(model.parameters())[:-1], lr=0.1)


class OwnSyncBatchNorm(toys.Points):
    """Synchronises its BatchNorm itself, or one of two such layers."""

    def __init__(self, layers, **settings):
        super().__init__(**settings)
        self.layers = layers

    def model(self):
        second = SyncBatchNorm(5) if self.layers == 2 else nn.BatchNorm1d(5)
        return nn.Sequential(nn.Linear(4, 5), SyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 5), second, nn.Linear(5, 1))


class Wavering(toys.Points):
    """Has kernels that are not deterministic, as it seems: gradients waver by some units in the last place.

    Args:
        by: Relative error of one gradient on rank 1, besides.
    """

    def __init__(self, by=0.0, **settings):
        super().__init__(**settings)
        self.by, self.handle = by, None

    def loss(self, model, batch):
        if self.handle is not None:
            self.handle.remove()
        error = self.by if my_rank() == 1 else 0.0
        ulps = random.SystemRandom().choice((0, 1, 2))
        self.handle = model[0].weight.register_hook(lambda g: g * (1 + error) * (1 + ulps * torch.finfo(g.dtype).eps))
        return super().loss(model, batch)


class InPairs(toys.Points):
    """Synchronises its BatchNorm among two ranks each."""

    pairs: ClassVar[list[dist.ProcessGroup]] = []

    def model(self):
        layer = SyncBatchNorm(5, group=self.pairs[my_rank() // 2])
        return nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 1))


class NormalisedByHook(toys.Points):
    """Has every rank scale its own gradient to length 1, by hooks on the tensors."""

    def model(self):
        model = super().model()
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g / (g.norm() + 1e-9))
        return model


class HalvedByHook(toys.Points):
    """Halves gradients by hooks, which the mean over ranks does not mind."""

    def model(self):
        model = super().model()
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g * 0.5)
        return model


class StochasticDepth(toys.Points):
    """Draws in forward, and not by torch's dropout."""

    def loss(self, model, batch):
        ids, x, y = batch
        return super().loss(model, (ids, x + 0.1 * torch.randn_like(x), y))


class OwnRate(toys.Points):
    """Has an optimizer that sets its own learning rate."""

    def optimizer(self, model):
        return OwnRateSGD(model.parameters(), lr=0.1)


class OwnRateSGD(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = 0.1 / group["taken"]
        super().step(closure)


class DrawnData(toys.Points):
    """Draws its samples from the common generator when it is made; augments every second one, perhaps by its own generator."""

    def __init__(self, augments="", **settings):
        super().__init__(**settings)
        self.augments = augments

    def eval_dataset(self):
        ids, x, y = super().dataset().tensors
        return TensorDataset(ids, x + torch.randn_like(x), y)

    def dataset(self):
        ids, x, y = super().dataset().tensors
        return Augmented(ids, x + torch.randn_like(x), y, self.augments)


class Augmented(TensorDataset):
    def __init__(self, ids, x, y, augments):
        super().__init__(ids, x, y)
        self.own = numpy.random.default_rng(0) if augments == "own" else None
        self.augments = augments

    def __getitem__(self, number):
        number, x, y = super().__getitem__(number)
        if self.augments and number % 2:
            x = x + (float(self.own.normal()) if self.own is not None else 0.1 * torch.randn(4).to(x.dtype))
        return number, x, y


class AsksPeers(toys.Points):
    """Takes the mean of all ranks' losses for what it logs."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.logged = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(self.logged)
        return loss


class NeedsFloat32(toys.Points):
    def loss(self, model, batch):
        ids, x, y = batch
        return super().loss(model, (ids, x.float() + torch.zeros(4), y.float()))


class HoldsALock(toys.Points):
    """Has a model that cannot be copied."""

    def model(self):
        model = super().model()
        model.lock = threading.Lock()
        return model


class Mishearing(Collective):
    """The process group, of which rank 1 hears one bit wrong."""

    def __init__(self, what):
        self.what = what

    def gather(self, values, layer):
        return self.flipped("gather", super().gather(values, layer))

    def total(self, values, layer):
        return self.flipped("total", super().total(values, layer))

    def flipped(self, what, heard):
        if what == self.what and my_rank() == 1:
            # The highest bit of the mantissa: sums of more than two have an error of their own.
            bits, bit = (torch.int64, 51) if heard.dtype == torch.float64 else (torch.int32, 22)
            heard.view(bits).view(-1)[-1] ^= 1 << bit
        return heard


class Counted:
    """An evaluation for recipes that have another kind of batch than theirs."""

    def evaluate(self, model, batch):
        return {"samples": (len(batch), len(batch))}


class Branching(Counted, toys.Branches):
    pass


class EvaluatesAtRandom(toys.Points):
    """Augments the samples that it is evaluated on."""

    def evaluate(self, model, batch):
        ids, x, y = batch
        exact = {f"exact {name}": pair for name, pair in super().evaluate(model, batch).items()}
        return {**exact, **super().evaluate(model, (ids, x + torch.randn_like(x), y))}


class CountsAtRandom(toys.Points):
    """A metric that often comes to the same whole number with other draws."""

    def evaluate(self, model, batch):
        _ids, x, y = batch
        return {"near": ((model(F.dropout(x, 0.2)).squeeze(1) > y).sum(), len(y))}


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


class Summed(toys.Points):
    """Returns a sum for the mean, beside BatchNorm, which may be idle."""

    def __init__(self, idle: bool = False, **settings):
        super().__init__(batch_norm=not idle, **settings)
        self.idle = idle

    def model(self):
        model = super().model()
        if self.idle:
            model.get_submodule("1").add_module("spare", nn.BatchNorm1d(3, affine=False))
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) * len(batch[0])


class TimesRanks(toys.Points):
    """Asks how many ranks there are, where one process would do something else."""

    def __init__(self, what: str, **settings):
        super().__init__(**settings)
        self.what = what

    def optimizer(self, model):
        return SGD(model.parameters(), lr=0.1 * (dist.get_world_size() if self.what == "lr" else 1))

    def loss(self, model, batch):
        return super().loss(model, batch) * (dist.get_world_size() if self.what == "loss" else 1)


class MeanBySum(toys.Points):
    """Asks too, and is right: a sum by the batch of all ranks, times the ranks over which DDP takes the mean."""

    def loss(self, model, batch):
        return super().loss(model, batch) * len(batch[0]) * dist.get_world_size() / 12


class Keeping(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[2].eval()
        return self


class KeepsEvaluating(toys.Points):
    def model(self):
        return Keeping(*super().model())


class LossInFloat32(toys.Points):
    def loss(self, model, batch):
        _ids, x, y = batch
        return F.mse_loss(model(x).squeeze(1).float(), y.float())


class OwnAutocast(toys.Points):
    def loss(self, model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(model, batch)


class Weighted(toys.Points):
    def loss(self, model, batch):
        _ids, x, y = batch
        weights = x[:, 0].abs() + 0.1
        return (F.mse_loss(model(x).squeeze(1), y, reduction="none") * weights).sum(), float(weights.sum())


class WithEmptyParameter(toys.Points):
    def model(self):
        model = super().model()
        model.empty = nn.Parameter(torch.zeros(0))
        return model

    def loss(self, model, batch):
        return super().loss(model, batch) + model.empty.sum()


class Mapped(toys.Points):
    def loss(self, model, batch):
        _ids, x, y = batch
        return F.mse_loss(torch.vmap(model)(x).squeeze(1), y)


class Noisy(Counted, toys.Noise):
    pass


class NoisyWavering(Counted, Wavering, toys.Noise):
    """Reads other samples each time."""

    def collate(self, samples):
        return torch.stack(samples).float()


class Learns(toys.Points):
    """Uses in its loss what it has learnt of data and model."""

    def dataset(self):
        dataset = super().dataset()
        self.scale = float(dataset.tensors[2].std())
        return dataset

    def model(self):
        self.criterion = nn.MSELoss()
        return super().model()

    def loss(self, model, batch):
        _ids, x, y = batch
        return self.criterion(model(x).squeeze(1), y / self.scale)


class MeetsAtBirth(toys.Points):
    """Waits for the other ranks, and makes a group, while it is made."""

    def dataset(self):
        if my_rank() != 0:
            dist.barrier()
        dataset = super().dataset()
        if my_rank() == 0:
            dist.barrier()
        return dataset

    def model(self):
        self.group = dist.new_group()
        return super().model()

    def eval_dataset(self):
        dist.barrier()
        return super().eval_dataset()


class LogsByBoundName(toys.Points):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        all_reduce(loss.detach().clone())
        return loss


class TrainsInLoss(toys.Points):
    def loss(self, model, batch):
        return super().loss(model.train(), batch)


class Drawn(torch.utils.data.Dataset):
    """Flips samples at random, by torch's generator or by one of its own."""

    def __init__(self, x, y, own):
        self.x, self.y, self.own = x, y, numpy.random.default_rng(0) if own else None

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        flipped = self.own.random() < 0.5 if self.own is not None else torch.rand(()) < 0.5
        return number, self.x[number] * (-1 if flipped else 1), self.y[number]


class Together(Drawn):
    """Is read batch by batch alone."""

    __getitem__ = None

    def __getitems__(self, numbers):
        return [Drawn.__getitem__(self, number) for number in numbers]


class Windows(torch.utils.data.Dataset):
    """Cuts a window out of a long series wherever its own generator says, whatever the number of the sample."""

    def __init__(self, series, count):
        self.series, self.count, self.places = series, count, numpy.random.default_rng(1337)

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        begin = int(self.places.integers(0, len(self.series) - 5))
        return 0, self.series[begin : begin + 4], self.series[begin + 4]


class SameWindows(toys.Points):
    def dataset(self):
        return Windows(toys.numbers(500).to(self.dtype), self.count)

    def eval_dataset(self):
        return super().dataset()


class Flips(toys.Points):
    """Reads samples that are flipped at random, and works in place on them."""

    def __init__(self, own=False, together=False, sums=False, **settings):
        super().__init__(**settings)
        self.own, self.kind, self.sums = own, Together if together else Drawn, sums

    def dataset(self):
        _ids, x, y = super().dataset().tensors
        return self.kind(x, y, self.own)

    def eval_dataset(self):
        return super().dataset()

    def loss(self, model, batch):
        _ids, x, y = batch
        x.sub_(0.5)
        return F.mse_loss(model(x).squeeze(1), y, reduction="sum" if self.sums else "mean")


class DrawsInForward(toys.Points):
    """Adds noise in forward, as autoencoders and diffusion do; its loss is a mean, or by mistake a sum."""

    def __init__(self, sums=False, **settings):
        super().__init__(**settings)
        self.sums = sums

    def loss(self, model, batch):
        _ids, x, y = batch
        noisy = x + torch.randn_like(x) * torch.rand(len(x), 1).to(x.dtype)
        return F.mse_loss(model(noisy).squeeze(1), y, reduction="sum" if self.sums else "mean")


class CancelsOut(toys.Points):
    """Has a loss that is small against what it is the difference of."""

    def dataset(self):
        ids, x, _ = super().dataset().tensors
        return TensorDataset(ids, x, (1998 + 10 * x[:, 0]).round())

    def model(self):
        model = super().model()
        nn.init.constant_(model[3].bias, 1998.0)
        return model


class OwnWeights(toys.Points):
    """Weighs its classes by a tensor of its own, in float32; normalises by the weights of a rank's own batch, or not at all."""

    def __init__(self, normalised=True, **settings):
        super().__init__(**settings)
        self.criterion = nn.CrossEntropyLoss(torch.tensor([0.1, 5.0]), reduction="mean" if normalised else "none")
        self.normalised = normalised

    def model(self):
        return nn.Linear(4, 2)

    def loss(self, model, batch):
        ids, x, _ = batch
        return self.criterion(model(x), ids % 2).mean()

    def evaluate(self, model, batch):
        return {"samples": (len(batch[0]), len(batch[0]))}


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


class AsksByBoundName(toys.Points):
    """Multiplies its loss or its learning rate by the number of ranks, by a name that was bound before."""

    def __init__(self, what, **settings):
        super().__init__(**settings)
        self.what = what

    def optimizer(self, model):
        return SGD(model.parameters(), lr=0.01 * (get_world_size() if self.what == "lr" else 1))

    def scheduler(self, optimizer):
        return StepLR(optimizer, 8 // get_world_size() + 3 if self.what == "schedule" else 100)

    def loss(self, model, batch):
        return super().loss(model, batch) * (dist.group.WORLD.size() if self.what == "loss" else 1)


class Logs(toys.Points):
    """Keeps a narrow copy for a log; normalises by a rank's own weights, which is wrong."""

    def loss(self, model, batch):
        _ids, x, y = batch
        weights, out = 1 + 0.02 * (x[:, 0] > 0), model(x).squeeze(1)
        self.logged = out.detach().bfloat16()
        return ((out - y).square() * weights).sum() / weights.sum()


class DrawsInCollate(toys.Points):
    """Flips whole batches by chance."""

    def collate(self, samples):
        ids, x, y = torch.utils.data.default_collate(samples)
        return ids, x * random.choice((-1, 1)), y


class LikesNoConstants(toys.Points):
    """Divides by the spread of what it draws, which constants have not."""

    def loss(self, model, batch):
        _ids, x, y = batch
        noise = torch.randn_like(x)
        return F.mse_loss(model(x + 0.1 * noise / noise.std(1, keepdim=True)).squeeze(1), y)


class TrainsWhatChanceLeaves(toys.Points):
    """Learns of a few samples at a time."""

    def loss(self, model, batch):
        _ids, x, y = batch
        return F.mse_loss(model(x).squeeze(1), y, reduction="none").mul(torch.rand(len(x)) < 0.4).mean()


class HoldsAGroup(toys.Points):
    """Has made a group before anything else, and asks it."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.group = dist.new_group()

    def loss(self, model, batch):
        all_reduce(torch.ones(1), group=self.group)
        return super().loss(model, batch)


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


def mine(name, **settings):
    return {"_target_": f"tests.test_faults.{name}", "count": 51, "dtype": "float32", **settings}


# User's recipe -> the checks of which one must be red first.
USERS = {
    "hook on rank 1": (mine("Hooked", ranks=[1]), {"R3"}),
    "hook on rank 0, where the reference runs": (mine("Hooked", ranks=[0]), {"R3"}),
    "optimizer of rank 1": (mine("OtherOptimizer"), {"R0", "R5"}),
    "data of rank 1": (mine("OtherData"), {"R1"}),
    "hidden statistics in training": (mine("HiddenStatistics", in_training=True), {"R3"}),
    "hidden statistics in evaluation": (mine("HiddenStatistics", in_training=False), {"R9"}),
    "not in the optimizer": (mine("NotInOptimizer"), {"R14"}),
    "a sum beside BatchNorm": (mine("Summed"), {"R7", "R8"}),
    "a sum beside idle BatchNorm": (mine("Summed", idle=True), {"R7", "R8"}),
    "loss times ranks": (mine("TimesRanks", what="loss"), {"R7", "R8"}),
    "lr times ranks": (mine("TimesRanks", what="lr"), {"R5"}),
    "normalised by hooks": (mine("NormalisedByHook"), {"R7", "R8"}),
    "a sum of drawn samples": (mine("Flips", sums=True), {"R7", "R8"}),
    "a sum of samples drawn by a generator of the data's": (mine("Flips", own=True, sums=True), {"R7", "R8"}),
    "a sum, and noise in forward": (mine("DrawsInForward", sums=True), {"R7", "R8"}),
    "normalised by weights of the recipe's own": (mine("OwnWeights"), {"R7", "R8"}),
    "loss times ranks by a bound name": (mine("AsksByBoundName", what="loss"), {"R7", "R8"}),
    "lr times ranks by a bound name": (mine("AsksByBoundName", what="lr"), {"R5"}),
    "a schedule by the number of ranks": (mine("AsksByBoundName", what="schedule"), {"R5"}),
    "windows of one series, the same on all ranks": (mine("SameWindows", count=48), {"R11"}),
    "normalised, beside a narrow log": (mine("Logs"), {"R7", "R8"}),
}

CORRECT = {
    "plain": {},
    "learns of its data": {"recipe": mine("Learns")},
    "meets at its birth": {"recipe": mine("MeetsAtBirth")},
    "logs by a bound name": {"recipe": mine("LogsByBoundName")},
    "train() in loss()": {"recipe": mine("TrainsInLoss", batch_norm=True)},
    "drawn samples, changed in place": {"recipe": mine("Flips", together=True)},
    "the same by a generator of its own": {"recipe": mine("Flips", own=True)},
    "noise in forward": {"recipe": mine("DrawsInForward")},
    "a loss that cancels out": {"recipe": mine("CancelsOut")},
    "weights of its own": {"recipe": mine("OwnWeights", normalised=False)},
    "a centre of all ranks": {"recipe": mine("CentredOnItsOwn", reduced=True)},
    "a centre of its own": {"recipe": mine("CentredOnItsOwn", reduced=False)},
    "draws in collate()": {"recipe": mine("DrawsInCollate")},
    "likes no constants": {"recipe": mine("LikesNoConstants")},
    "trains what chance leaves": {"recipe": mine("TrainsWhatChanceLeaves")},
    "holds a group": {"recipe": mine("HoldsAGroup")},
    "freezes in optimizer()": {"recipe": mine("FreezesInOptimizer")},
    "a static graph": {"recipe": mine("Shared"), "ddp": Ddp(static_graph=True)},
    "bias before sync_bn": {"recipe": mine("BiasBeforeBatchNorm", count=48), "sync_bn": True, "global_batch_size": 12},
    "spectral norm": {"recipe": mine("Normed", count=48), "grad_accumulation": 3, "clip_norm": 0.05},
    "old spectral norm, float64": {
        "recipe": mine("Normed", old=True, count=48, dtype="float64"),
        "precision": "float64",
        "grad_accumulation": 2,
    },
    "spectral norm beside BatchNorm": {"recipe": mine("Normed", batch_norm=True)},
    "spectral norm beside BatchNorm, accumulated": {"recipe": mine("Normed", batch_norm=True), "grad_accumulation": 2},
    "spectral norm beside sync_bn": {"recipe": mine("Normed", batch_norm=True), "sync_bn": True, "grad_accumulation": 2},
    "remembers what it has seen": {"recipe": mine("Remembering"), "grad_accumulation": 2},
    "weights changed by forward": {"recipe": mine("Taught"), "grad_accumulation": 2},
    "complex buffers, made and grown ones": {"recipe": mine("Turning")},
    "InstanceNorm beside sync_bn": {"recipe": mine("InstanceNormed", count=48), "sync_bn": True, "global_batch_size": 12},
    "BatchNorm without statistics": {"recipe": mine("KeepsNoStatistics")},
    "the number of ranks, used well": {"recipe": mine("MeanBySum", count=48), "global_batch_size": 12},
    "kept in evaluation mode": {"recipe": mine("KeepsEvaluating", dropout=0.5)},
    "loss in float32": {"recipe": mine("LossInFloat32")},
    "autocast of its own": {"recipe": mine("OwnAutocast")},
    "a weight as count": {"recipe": mine("Weighted")},
    "an empty parameter": {"recipe": mine("WithEmptyParameter")},
    "vmap": {"recipe": mine("Mapped")},
    "counts what it draws": {"recipe": mine("CountsAtRandom")},
    "float64, Adam": {"precision": "float64", "recipe": {**WHOLE, "dtype": "float64", "optimizer": "adam"}},
    "bfloat16": {"precision": "bfloat16"},
    "accumulated, clipped": {"grad_accumulation": 2, "clip_norm": 0.05},
    "sync_bn": {"sync_bn": True},
    "sync_bn, accumulated": {
        "sync_bn": True,
        "grad_accumulation": 2,
        "precision": "float64",
        "recipe": {**WHOLE, "dtype": "float64"},
    },
    "sparse": {"recipe": TOKENS, "global_batch_size": 6},
    "last batch of one sample": {"recipe": {**WHOLE, "batch_norm": False, "count": 18}},
    "unused": {"recipe": mine("Branching"), "ddp": Ddp(find_unused_parameters=True)},
    "small buckets, viewed": {"ddp": Ddp(bucket_cap_mb=0.0001, gradient_as_bucket_view=True)},
    "hooked on all ranks": {"recipe": mine("Hooked", ranks=[0, 1, 2, 3])},
    "evaluated at random": {"recipe": mine("EvaluatesAtRandom")},
    "noise": {"recipe": mine("Noisy", dtype="float64"), "precision": "float64"},
    "halved by hooks": {"recipe": mine("HalvedByHook")},
    "random forward": {"recipe": mine("StochasticDepth")},
    "optimizer with a rate of its own": {"recipe": mine("OwnRate")},
    "data drawn when it is made": {"recipe": mine("DrawnData")},
    "augmented now and then": {"recipe": mine("DrawnData", augments="common")},
    "augmented by its own generator": {"recipe": mine("DrawnData", augments="own")},
    "asks its peers": {"recipe": mine("AsksPeers")},
    "cannot run in float64": {"recipe": mine("NeedsFloat32")},
    "cannot be copied": {"recipe": mine("HoldsALock")},
    "synchronised by the recipe": {"recipe": mine("OwnSyncBatchNorm", layers=2)},
    "synchronised in part": {"recipe": mine("OwnSyncBatchNorm", layers=1)},
}


NOT_PROVEN = {
    "draws in collate()",
    "likes no constants",
    "trains what chance leaves",
    "a centre of its own",
    "remembers what it has seen",
    "cannot run in float64",
    "synchronised in part",
}
"""Correct runs of which the whole batch in one process says nothing."""


# --- in the ranks ----------------------------------------------------------------------------------------------------


def stub(seat, folder, deterministic=True):
    """Return what a verification needs of a rank."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    run = RunDir(folder / f"run-{seat.world_size}")
    run.path.mkdir(exist_ok=True)
    return SimpleNamespace(run=run, plan=SimpleNamespace(nprocs=seat.world_size), record=Record())


class Record:
    """Keeps what a rank records."""

    def __init__(self):
        self.logged = []

    def event(self, kind, **body):
        pass

    def log(self, level, text):
        self.logged.append(text)


def taken(plan, seat, folder):
    recipe = make_recipe(plan.recipe)
    trials = Trials(stub(seat, folder, plan.deterministic), recipe, prepare(recipe, seat, seat.rank, plan.seed), seat)
    trial = trials.take(plan)
    said = trials.verdict.sentences() if trials.verdict is not None else []
    proven = trials.verdict is not None and trials.verdict.is_proof
    return None if trial is None else (trial.fired, {**trial.checks, "proven": proven}, said)


def faulty(name, **settings):
    return lambda seat, folder: taken(plan_of(fault=name, compare="full", **NEEDS.get(name, {}), **settings), seat, folder)


def correct(settings):
    return lambda seat, folder: taken(plan_of(compare="full", **settings), seat, folder)


def users(recipe):
    # As many for each rank where the samples are to be the same.
    size = 12 if recipe["count"] == 48 else BATCH
    return lambda seat, folder: taken(plan_of(compare="full", recipe=recipe, global_batch_size=size), seat, folder)


def wavering(by, name="Wavering"):
    return lambda seat, folder: taken(plan_of(compare="full", deterministic=False, recipe=mine(name, by=by)), seat, folder)


def in_pairs(seat, folder):
    InPairs.pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return taken(plan_of(compare="full", recipe=mine("InPairs")), seat, folder)


def misheard(what):
    def case(seat, folder):
        with exchanging(Mishearing(what)):
            return taken(plan_of(compare="full", sync_bn=True), seat, folder)

    return case


def left_out(seat, folder):
    """Return why each of these faults does not apply to a plain recipe, on this rank."""
    reasons = {}
    plan = plan_of(recipe={"_target_": "tests.toys.Points", "dtype": "float32"}, global_batch_size=12, steps=1)
    for name in ("stale_buffers", "same_dropout_everywhere", "sparse_rows_lost", "scheduler_stepped_by_each_rank"):
        recipe = make_recipe(plan.recipe)
        with pytest.raises(DoesNotApply) as refused:
            inject(Trainer(dataclasses.replace(plan, fault=name), recipe, recipe.dataset(), seat))
        reasons[name] = str(refused.value)
    return reasons


def audited(seat, folder):
    """Return what an audit writes and shows; of two correct runs, to be quick."""
    audits.CORRECT_RUNS = 2
    rank = stub(seat, folder)
    rank.plan.train = plan_of(compare="audit", on_mismatch="stop", recipe={**WHOLE, "dropout": 0.0, "batch_norm": False})
    recipe = make_recipe(rank.plan.train.recipe)
    audits.audit(rank, Trials(rank, recipe, recipe.dataset(), seat), seat)
    return json.loads(rank.run.audit.read_text()), rank.record.logged


def blind(seat, folder):
    """Return what an audit says whose checks are blind to a fault."""
    audits.CORRECT_RUNS, known = 0, audits.FAULTS
    judge, audits.judge = audits.judge, lambda evidence: SimpleNamespace(failed=None, checks=())
    audits.FAULTS = {name: known[name] for name in ("not_sharded", "divided_twice")}
    rank = stub(seat, folder)
    rank.plan.train = plan_of(compare="audit", on_mismatch="stop")
    recipe = make_recipe(rank.plan.train.recipe)
    try:
        with pytest.raises(Mismatch) as refused:
            audits.audit(rank, Trials(rank, recipe, recipe.dataset(), seat), seat)
    finally:
        audits.judge, audits.FAULTS = judge, known
    return str(refused.value)


def on(size, case):
    """Return the case for groups of that size alone."""
    return lambda seat, folder: case(seat, folder) if seat.world_size == size else None


CASES = {
    **{name: faulty(name) for name in FAULTS},
    "one_gradient_scaled in float64": faulty("one_gradient_scaled", precision="float64", recipe={**WHOLE, "dtype": "float64"}),
    "unequal in the last batch alone": on(
        3, faulty("unequal_shards_averaged_equally", recipe={**WHOLE, "count": 52, "dropout": 0.0}, global_batch_size=15)
    ),
    **{f"{name} with sync_bn": faulty(name, sync_bn=True) for name in WITH_SYNC_BN},
    "gather misheard": misheard("gather"),
    "total misheard": misheard("total"),
    **{f"correct: {name}": correct(settings) for name, settings in CORRECT.items()},
    **{f"user: {name}": users(recipe) for name, (recipe, _) in USERS.items()},
    "left out": left_out,
    "audited": on(2, audited),
    "blind": on(2, blind),
    "wavering": wavering(0.0),
    "wavering, and wrong": wavering(1e-4),
    "wavering, other samples": wavering(0.0, "NoisyWavering"),
    "wavering, and wrong, other samples": wavering(1e-4, "NoisyWavering"),
    "in pairs": on(4, in_pairs),
    "lr off by a chosen size": faulty("lr_times_ranks", fault_size=2e-7),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    with groups_of("tests.test_faults", tmp_path_factory.mktemp("faults")) as outcomes:
        yield outcomes


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_its_check(outcomes, name, size):
    fired, checks, said = outcomes.of(size, name)[0]
    assert fired in FAULTS[name].checks, (checks, said)


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CORRECT)
def test_no_correct_run_is_accused(outcomes, name, size):
    fired, checks, said = outcomes.of(size, f"correct: {name}")[0]
    assert fired is None, said
    assert checks["proven"] == (name not in NOT_PROVEN), checks


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
def test_buffers_that_one_forward_leaves_the_next_are_followed(outcomes, size):
    for name, status in {"spectral norm": "passed", "remembers what it has seen": "not checked"}.items():
        _, checks, said = outcomes.of(size, f"correct: {name}")[0]
        assert checks["R7"] == status, said


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", USERS)
def test_faults_of_a_users_own_code_are_caught(outcomes, name, size):
    fired, checks, said = outcomes.of(size, f"user: {name}")[0]
    assert fired in USERS[name][1], (checks, said)
    if name == "hidden statistics in training":
        assert "rank 1, activation, module linear" in said[0]


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WITH_SYNC_BN)
def test_faults_are_caught_under_synchronised_batch_norm(outcomes, name, size):
    fired, checks, said = outcomes.of(size, f"{name} with sync_bn")[0]
    assert fired in FAULTS[name].checks, (checks, said)


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", ["gather", "total"])
def test_statistics_that_a_rank_hears_wrong_are_caught(outcomes, what, size):
    fired, checks, said = outcomes.of(size, f"{what} misheard")[0]
    assert fired == "R4" and "statistics, tensor 1" in said[0], (checks, said)


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("data", ["", ", other samples"])
def test_kernels_that_waver_are_compared_within_noise(outcomes, size, data):
    fired, checks, said = outcomes.of(size, f"wavering{data}")[0]
    assert fired is None and checks["R3"] == "passed", (checks, said)
    fired, checks, said = outcomes.of(size, f"wavering, and wrong{data}")[0]
    assert fired == "R3" and "excess ratio" in said[0], (checks, said)


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
def test_a_fault_of_a_chosen_size_is_caught(outcomes, size):
    assert outcomes.of(size, "lr off by a chosen size")[0][0] == "R5"


@pytest.mark.ranks
def test_layers_synchronised_among_some_ranks_are_not_replayed(outcomes):
    fired, checks, said = outcomes.of(4, "in pairs")[0]
    assert fired is None, said
    assert {checks[name] for name in ("R3", "R7", "R11")} == {"not checked"}


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
def test_a_fault_too_small_for_bits_is_caught_in_float64(outcomes, size):
    assert outcomes.of(size, "one_gradient_scaled in float64")[0][0] in ("R4", "R7")


@pytest.mark.ranks
def test_shards_that_are_unequal_in_the_last_batch_alone(outcomes):
    """Batches of 15 divide by 3 ranks; of the last one's 7 samples, rank 0 has one more than the others."""
    assert outcomes.of(3, "unequal in the last batch alone")[0][0] in FAULTS["unequal_shards_averaged_equally"].checks


@pytest.mark.ranks
def test_faults_that_do_not_apply_are_refused_on_all_ranks(outcomes):
    for reasons in outcomes.of(2, "left out"):
        assert (
            reasons["stale_buffers"]
            == "fault=stale_buffers does not apply: the model of Points keeps no statistics of BatchNorm."
        )
        assert "draws no random numbers in forward" in reasons["same_dropout_everywhere"]
        assert "no sparse embeddings" in reasons["sparse_rows_lost"]
        assert "Points has no scheduler" in reasons["scheduler_stepped_by_each_rank"]


@pytest.mark.ranks
def test_an_audit_makes_its_table(outcomes):
    data, logged = outcomes.of(2, "audited")[0]
    rows = {row.fault: row for row in audit_table(trials_of(data))}
    assert rows.keys() | data["left_out"].keys() == {*FAULTS, "none"}
    assert all(row.is_right for row in rows.values())
    assert (rows["none"].red, rows["none"].trials) == (0, 2)
    assert rows["lr_off_on_one_rank"].by_older_rules == {"loss within 1e-3": 0, "loss within 1e-5": 0, "assert_close": 0}
    assert sorted(data["left_out"]) == [
        "accumulation_without_divisor",
        "clipped_before_reduction",
        "same_dropout_everywhere",
        "sparse_rows_lost",
        "stale_buffers",
    ]
    assert logged == ["\n".join(["What the checks catch:", *audit_lines(data)])]


@pytest.mark.ranks
def test_an_audit_of_blind_checks_stops_the_job(outcomes):
    for said in outcomes.of(2, "blind"):
        assert said.startswith("The checks are wrong about this training. ")
        assert "not_sharded: caught 0 of 1" in said


class PeersAsked(toys.Points):
    """Has a synchronised layer of torch's."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 5), nn.SyncBatchNorm(5), nn.Linear(5, 1))


def test_one_rank_asks_nobody():
    plan, cpu = plan_of(recipe=mine("PeersAsked")), torch.device("cpu")
    reasons = [Reference(plan, n, cpu, 8, PeersAsked().model()).batch_norms.why_not_alone for n in (1, 2)]
    assert reasons == ["", NEEDS_PEERS]


def test_every_fault_has_an_injection_and_an_option():
    assert INJECTIONS.keys() == FAULTS.keys()
    assert [fault.number for fault in FAULTS.values()] == list(range(1, 37))
    options = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / "fault").glob("*.yaml")}
    assert options.pop("none") == {"name": None}
    assert options.keys() == FAULTS.keys()
    for name, option in options.items():
        assert option == {"name": name} | ({"size": FAULTS[name].size} if FAULTS[name].unit else {})


@pytest.mark.parametrize(
    ("settings", "nprocs", "sentence"),
    [
        ({"fault": "not_shardet"}, 2, "fault=not_shardet is unknown; did you mean fault=not_sharded?"),
        ({"fault": "not_sharded"}, 1, "fault=not_sharded is a fault between ranks, and nprocs=1. Use nprocs=2 or more."),
        (
            {"fault": "not_sharded", "fault_size": 3.0},
            2,
            "fault.size=3.0 has no meaning for fault=not_sharded, which has no size. Leave it out.",
        ),
        (
            {"fault": "one_sample_twice", "fault_size": 0.5},
            2,
            "fault.size=0.5 is not a size of fault=one_sample_twice (id an epoch): it is a whole number from 1 on.",
        ),
        (
            {"fault": "lr_off_on_one_rank", "fault_size": 0.0},
            2,
            "fault.size=0.0 is not a size of fault=lr_off_on_one_rank (relative): it is a number above 0.",
        ),
        (
            {"fault": "clipped_before_reduction"},
            2,
            "fault=clipped_before_reduction needs clipping, and clip_norm=null. Use clip_norm=1.0, or what cuts something off.",
        ),
        (
            {"fault": "accumulation_without_divisor"},
            2,
            "fault=accumulation_without_divisor needs accumulation, and grad_accumulation=1. Use grad_accumulation=2 or more.",
        ),
        (
            {"fault": "epoch_not_set", "epochs": 1},
            2,
            "fault=epoch_not_set needs a second epoch, and epochs=1. Use epochs=2 or more.",
        ),
        (
            {"fault": "not_sharded", "compare": "audit"},
            2,
            "compare=audit injects every fault by itself: leave out fault=not_sharded, or use compare=full.",
        ),
    ],
)
def test_the_parent_refuses_what_it_can_know(settings, nprocs, sentence):
    assert plan_of(**settings).problems(nprocs) == [sentence]


def test_a_plan_without_a_fault_is_left_alone():
    recipe = toys.Points(dtype="float32")
    trainer = Trainer(plan_of(), recipe, recipe.dataset(), toys_seat())
    before = dict(vars(trainer))
    assert inject(trainer) is trainer
    assert vars(trainer) == before


def toys_seat():
    from harness.training.trainer import Seat

    return Seat(0, 1, torch.device("cpu"))

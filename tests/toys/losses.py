"""Recipes whose loss, hooks or optimizer is wrong in a user's way, or right in an unusual one."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce, get_world_size
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from tests import toys
from tests.toys import my_rank


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


class NotInOptimizer(toys.Points):
    """Forgets the last bias: so does the reference, whose optimizer is the same."""

    def optimizer(self, model):
        return SGD(list(model.parameters())[:-1], lr=0.1)


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


class Counted:
    """An evaluation for recipes that have another kind of batch than theirs."""

    def evaluate(self, model, batch):
        return {"samples": (len(batch), len(batch))}


class Branching(Counted, toys.Branches):
    pass


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


class Mapped(toys.Points):
    def loss(self, model, batch):
        _ids, x, y = batch
        return F.mse_loss(torch.vmap(model)(x).squeeze(1), y)


class LogsByBoundName(toys.Points):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        all_reduce(loss.detach().clone())
        return loss


class TrainsInLoss(toys.Points):
    def loss(self, model, batch):
        return super().loss(model.train(), batch)


class DrawsInForward(toys.Points):
    """Adds noise in forward, as autoencoders and diffusion do; its loss is a mean, or by mistake a sum."""

    def __init__(self, sums=False, **settings):
        super().__init__(**settings)
        self.sums = sums

    def loss(self, model, batch):
        _ids, x, y = batch
        noisy = x + torch.randn_like(x) * torch.rand(len(x), 1).to(x.dtype)
        return F.mse_loss(model(noisy).squeeze(1), y, reduction="sum" if self.sums else "mean")


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

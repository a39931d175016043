"""Recipes whose samples are wrong in a user's way, or right in an unusual one."""

from __future__ import annotations

import random
import threading

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests import toys
from tests.toys import my_rank
from tests.toys.losses import Counted, Wavering


class OtherData(toys.Points):
    """Has one number of one sample different on rank 1."""

    def dataset(self):
        dataset = super().dataset()
        if my_rank() == 1:
            dataset.tensors[1][:, 0] += 1e-6
        return dataset


class DrawnData(toys.Points):
    """Draws its samples from the common generator when it is made; augments every second one, perhaps by its own generator.

    Args:
        augments: ``common``: by torch's; ``own``: by one that each rank seeds by its number; ``alike``: by one that all seed
            alike; ``number``: by one that the sample's number seeds.
        locked: The data set cannot be copied.
    """

    def __init__(self, augments="", locked=False, **settings):
        super().__init__(**settings)
        self.augments, self.locked = augments, locked

    def eval_dataset(self):
        ids, x, y = super().dataset().tensors
        return TensorDataset(ids, x + torch.randn_like(x), y)

    def dataset(self):
        ids, x, y = super().dataset().tensors
        dataset = Augmented(ids, x + torch.randn_like(x), y, self.augments)
        dataset.lock = threading.Lock() if self.locked else None
        return dataset


class Augmented(TensorDataset):
    def __init__(self, ids, x, y, augments):
        super().__init__(ids, x, y)
        self.own = numpy.random.default_rng(my_rank() if augments == "own" else 0)
        self.augments = augments

    def __getitem__(self, number):
        number, x, y = super().__getitem__(number)
        if self.augments and number % 2:
            x = x + self.noise(int(number)).to(x.dtype)
        return number, x, y

    def noise(self, number):
        if self.augments == "common":
            return 0.1 * torch.randn(4)
        generator = numpy.random.default_rng(number) if self.augments == "number" else self.own
        return torch.full((4,), float(generator.normal()))


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


class Drawn(torch.utils.data.Dataset):
    """Flips samples at random, by torch's generator or by one of its own, which each rank seeds by its number."""

    def __init__(self, x, y, own):
        self.x, self.y, self.own = x, y, numpy.random.default_rng(my_rank()) if own else None

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


class DrawsInCollate(toys.Points):
    """Flips whole batches by chance."""

    def collate(self, samples):
        ids, x, y = torch.utils.data.default_collate(samples)
        return ids, x * random.choice((-1, 1)), y

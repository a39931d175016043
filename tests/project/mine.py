"""A recipe of somebody's own, and all that can go wrong in it."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class NoLength(Dataset):
    def __getitem__(self, number):
        return number


class Telling(Dataset):
    """Tells its workers' process ids and threads, and fails at a sample."""

    def __init__(self, folder, samples):
        self.folder, self.samples = folder, samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        (self.folder / f"worker-{os.getpid()}").write_text(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        if number == 7:
            # Not before a worker of the other rank is there too.
            deadline = time.monotonic() + 600
            while len(list(self.folder.glob("worker-*"))) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            raise RuntimeError("sample 7 is broken")
        return self.samples[number]


class Mine:
    def __init__(self, lr=0.1, count=20, fault="", folder=None, sleep_s=0.0):
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"recipe.folder={folder}: there is no such folder.")
        if fault == "constructor":
            raise ValueError("not about a setting")
        self.lr, self.count, self.fault, self.sleep_s = lr, count, fault, sleep_s
        self.folder = Path(folder) if folder else None

    def prepare(self):
        if self.folder:
            with (self.folder / "prepared").open("a") as file:
                file.write(f"{os.environ['RANK']}\n")

    def dataset(self):
        if self.fault == "no length":
            return NoLength()
        assert self.folder is None or (self.folder / "prepared").exists()
        draw = torch.Generator().manual_seed(0)
        samples = TensorDataset(torch.arange(self.count), torch.randn(self.count, 4, generator=draw))
        self.width = samples[0][1].shape[0]
        return Telling(self.folder, samples) if self.fault == "worker" else samples

    def eval_dataset(self):
        draw = torch.Generator().manual_seed(1)
        return TensorDataset(torch.arange(5), torch.randn(5, 4, generator=draw))

    def model(self):
        if self.fault == "no parameter":
            return nn.ReLU()
        return nn.Sequential(nn.Linear(self.width, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))

    def optimizer(self, model):
        return torch.optim.SGD([] if self.fault == "nothing to optimize" else model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model, batch):
        ids, x = batch
        if self.sleep_s:
            time.sleep(self.sleep_s)
            self.sleep_s = 0.0
        losses = (model(x).squeeze(1) - x.sum(1)).square()
        if self.fault == "infinite" and 3 in ids:
            return losses.mean() + torch.inf
        return {"None": None, "a float": 1.0, "no mean": losses}.get(self.fault, losses.mean())

    def evaluate(self, model, batch):
        ids, x = batch
        return {"loss": ((model(x).squeeze(1) - x.sum(1)).square().sum(), len(ids))}

"""The MNIST recipe as anybody would write it by hand on torch's DDP; prints a JSON line of marks from rank 0.

``torchrun --nproc-per-node=4 benchmarks/mnist_ddp.py STEPS``, or ``python benchmarks/mnist_ddp.py STEPS NPROCS`` by mp.spawn.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from recipes.mnist import Mnist

WARM_UP = 3


def main(steps: int, global_batch: int = 64) -> None:
    """Train ``steps`` steps on this rank of the process group, and leave it."""
    torch.manual_seed(0)
    recipe = Mnist()
    dataset = recipe.dataset()
    model = DistributedDataParallel(recipe.model())
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer, steps)
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=global_batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    marks: list[float] = []
    taken = 0
    while taken < steps:
        batches = iter(loader)
        for _ in range(min(len(loader), steps - taken)):
            batch = next(batches)
            optimizer.zero_grad()
            loss = recipe.loss(model, batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss.item()
            marks.append(time.monotonic())
            taken += 1
    if dist.get_rank() == 0:
        steps_s = [after - before for before, after in itertools.pairwise(marks[WARM_UP:])]
        said = {"first_step": marks[0], "last_step": marks[-1], "step_s": statistics.median(steps_s) if steps_s else 0.0}
        print("MARKS " + json.dumps(said | {"threads": torch.get_num_threads()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def spawned(rank: int, steps: int, nprocs: int, store: str) -> None:
    """Be one rank of mp.spawn."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nprocs)
    main(steps)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        with tempfile.TemporaryDirectory() as folder:
            numbers = (int(sys.argv[1]), int(sys.argv[2]))
            spawn(spawned, args=(*numbers, f"{folder}/store"), nprocs=numbers[1])
    else:
        dist.init_process_group("gloo")
        main(int(sys.argv[1]))

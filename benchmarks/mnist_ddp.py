"""The MNIST recipe as anybody would write it by hand on torch's DDP; prints a JSON line of marks from rank 0.

``torchrun --nproc-per-node=4 benchmarks/mnist_ddp.py STEPS`` or, from ``start.py``, under other launchers.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from recipes.mnist import Mnist

WARM_UP = 3


def main(steps: int, global_batch: int = 64) -> None:
    """Train ``steps`` steps on this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    recipe = Mnist()
    dataset = recipe.dataset()
    model = DistributedDataParallel(recipe.model())
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer, steps)
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True, seed=0)  # type: ignore[arg-type]
    loader = DataLoader(dataset, batch_size=global_batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    marks: list[float] = []
    times: list[float] = []
    taken = 0
    while taken < steps:
        batches = iter(loader)
        for _ in range(min(len(loader), steps - taken)):
            begin = time.monotonic()
            batch = next(batches)
            optimizer.zero_grad()
            loss = recipe.loss(model, batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss.item()
            marks.append(time.monotonic())
            times.append(marks[-1] - begin)
            taken += 1
    if dist.get_rank() == 0:
        measured = times[WARM_UP:] or times
        said = {"first_step": marks[0], "last_step": marks[-1], "step_s": statistics.median(measured)}
        print("MARKS " + json.dumps(said | {"threads": torch.get_num_threads()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))

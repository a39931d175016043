"""A DDP model, an optimizer and one training step: what every start has to reach. Runs under any launcher."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def one_step() -> float:
    """Join the group from the environment, take one step, and return its loss."""
    dist.init_process_group("gloo")
    value = _train()
    dist.barrier()
    dist.destroy_process_group()
    return value


def _train() -> float:
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def one_step_of_harness() -> float:
    """The same in a rank of ``harness.spawn``, which meets the other ranks by itself at the end."""
    import harness

    harness.init_parallel_env()
    return _train()


def as_spawned(rank: int, world_size: int, port: int) -> None:
    """The same under ``torch.multiprocessing.spawn``, which leaves the environment to its caller."""
    import os

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    one_step()


if __name__ == "__main__":
    one_step()

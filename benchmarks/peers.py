"""The step of one_step.py as other tools start it: ``python benchmarks/peers.py NAME NPROCS``, in an environment that has them.

Accelerate is started as a notebook does, by fork after torch was imported: its own command has no way to start several CPU
ranks without MPI.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def by_torch(nprocs: int) -> None:
    """Start by ``torch.multiprocessing.spawn``."""
    from torch.multiprocessing.spawn import spawn

    from benchmarks.one_step import as_spawned

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(as_spawned, args=(nprocs, port), nprocs=nprocs)


def by_accelerate(nprocs: int) -> None:
    """Start by Accelerate's ``debug_launcher``."""
    from accelerate import debug_launcher

    debug_launcher(_accelerated, num_processes=nprocs)


def _accelerated() -> None:
    import torch
    from accelerate import Accelerator
    from torch import nn

    accelerator: Any = Accelerator(cpu=True)
    plain = nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(8, 64)).square().mean())
    optimizer.step()
    accelerator.wait_for_everyone()


def by_fabric(nprocs: int) -> None:
    """Start by Lightning Fabric, which starts this script again for the other ranks."""
    import torch
    from lightning_fabric import Fabric
    from torch import nn

    fabric: Any = Fabric(accelerator="cpu", devices=nprocs, strategy="ddp")
    fabric.launch()
    plain = nn.Linear(64, 64)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(8, 64)).square().mean())
    optimizer.step()
    fabric.barrier()


def by_paddle(nprocs: int) -> None:
    """Start by ``paddle.distributed.spawn``."""
    import paddle.distributed as dist

    dist.spawn(_paddled, nprocs=nprocs, backend="gloo")


def _paddled() -> None:
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    plain = paddle.nn.Linear(64, 64)
    model: Any = paddle.DataParallel(plain)
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=plain.parameters())
    model(paddle.ones([8, 64])).square().mean().backward()
    optimizer.step()
    dist.barrier()


STARTS = {"torch": by_torch, "accelerate": by_accelerate, "lightning_fabric": by_fabric, "paddle": by_paddle}
"""Name of the package -> what starts ranks with it."""

if __name__ == "__main__":
    STARTS[sys.argv[1]](int(sys.argv[2]))

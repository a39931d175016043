"""Gradients that travel compressed: DDP's communication hooks, by the name that ``ddp.comm_hook`` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Name -> type in which gradients travel, and in which they are added up."""

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
MakeHook = Callable[[], tuple[Any, Hook]]
"""Returns the state that a hook keeps, and the hook: new ones for each wrapped model."""


def comm_hook(name: str) -> MakeHook | None:
    """Return what makes the hook of this name; None for ``none``."""
    if name == "powersgd":
        return _power_sgd
    return (lambda: (None, in_type(WIRE[name]))) if name in WIRE else None


def in_type(dtype: torch.dtype) -> Hook:
    """Return a hook that averages in ``dtype``, as torch's own hooks do, which refuse bfloat16 on gloo."""

    # DDP compares annotations with classes, and those of this module are texts.
    def hook(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        wide = bucket.buffer()
        # Divided before the sum, which in float16 would overflow sooner than the mean.
        sent = wide.to(dtype).div_(dist.get_world_size())
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: wide.copy_(future.value()[0]))

    return hook


def _power_sgd() -> tuple[Any, Hook]:
    """Return PowerSGD of rank 1 (Vogels, Karimireddy, Jaggi, NeurIPS 2019), from the third backward on."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    # Not before: DDP puts its buckets in order after the first backward.
    return power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), power.powerSGD_hook

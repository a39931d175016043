"""Faults in what a rank starts from: parameters, buffers, random streams, the group itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from harness.training.seeds import derive, seed_everything, seed_rank
from harness.training.state import undisturbed_random
from harness.training.trainer import Trainer
from harness.verify.faults.seams import CHOSEN, injection, next_numbers, require, tried


@injection
def each_process_alone(trainer: Trainer, size: float | None) -> None:
    """Do nothing more: :func:`harness.verify.faults.inject.seated` has put this trainer into a world of 1."""
    assert trainer.seat.world_size == 1


@injection
def not_synchronised_at_birth(trainer: Trainer, size: float | None) -> None:
    """Give each rank the parameters of a seed of its own, as if nobody had sent rank 0's."""
    with undisturbed_random(), torch.no_grad():
        # With the rank in the name: otherwise it would be the same model again.
        seed_everything(derive(trainer.plan.seed, "model", trainer.seat.rank))
        own = trainer.recipe.model()
        if trainer.seat.rank > 0:
            # Into the parameters that are there: DDP is built, and will not send rank 0's again.
            for parameter, value in zip(trainer.model.parameters(), own.parameters(), strict=True):
                parameter.copy_(value)


@injection
def one_ulp_at_birth(trainer: Trainer, size: float | None) -> None:
    """Move one number of rank 1's first parameter by ``size`` representable numbers."""
    if trainer.seat.rank == CHOSEN:
        with torch.no_grad():
            # A view: what is copied into it goes into the parameter.
            first = trainer.parameters[0].view(-1)[:1]
            first.copy_(next_numbers(first, torch.full_like(first, torch.inf), int(size or 1)))


@injection
def stale_buffers(trainer: Trainer, size: float | None) -> None:
    """Move one number of rank 1's BatchNorm statistics, after each step, ``size`` numbers back towards where it was."""
    layers = [m for m in trainer.model.modules() if isinstance(m, _BatchNorm)]
    buffers = [m.running_mean for m in layers if m.running_mean is not None]
    require(bool(buffers), trainer, f"the model of {type(trainer.recipe).__name__} keeps no statistics of BatchNorm")
    accumulate = trainer.accumulate

    def faulty(batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        before = buffers[0].clone()
        sums = accumulate(batch, loaded)
        if trainer.seat.rank == CHOSEN:
            # Not on rank 0, whose buffers the next forward sends to all: they would be right by being everybody's.
            _lag(buffers[0], before, int(size or 1))
        return sums

    trainer.accumulate = faulty  # type: ignore[method-assign]


def _lag(buffer: Tensor, before: Tensor, steps: int) -> None:
    """Move the first number that has changed back towards its value before."""
    # Of those that have changed: any other has nothing to lag behind.
    moved = (buffer != before).nonzero().view(-1)[:1]
    buffer[moved] = next_numbers(buffer[moved], before[moved], steps)


@injection
def same_dropout_everywhere(trainer: Trainer, size: float | None) -> None:
    """Give every rank the random stream of rank 0."""
    name = type(trainer.recipe).__name__
    require(tried(trainer).draws_random, trainer, f"{name} draws no random numbers in forward (dropout is 0, or there is none)")
    seed_rank(trainer.plan.seed, 0)

"""Faults in how gradients are added up over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.training.parallel.comm_hooks import Hook, in_type
from harness.training.parallel.gradients import gradient_values, scale_
from harness.training.trainer import Trainer
from harness.verify.faults.seams import (
    CHOSEN,
    after_reduction,
    dense_parameters,
    flip_bit,
    injection,
    keep_local,
    largest,
    require,
)


@injection
def last_bias_not_reduced(trainer: Trainer, size: float | None) -> None:
    """Leave each rank its own gradient of the last bias; of the last tensor in a model without biases."""
    named = dense_parameters(trainer)
    biases = [p for name, p in named if name.endswith("bias")]
    parameter = biases[-1] if biases else named[-1][1]
    local = keep_local(parameter)
    after_reduction(trainer, lambda step: _put_gradient(parameter, local()))


@injection
def rank0_value_everywhere(trainer: Trainer, size: float | None) -> None:
    """Give every rank rank 0's gradient of the first tensor, and not the mean."""
    _, parameter = dense_parameters(trainer)[0]
    local = keep_local(parameter)

    def change(step: int) -> None:
        # broadcast writes into what it is given.
        value = local().clone()
        dist.broadcast(value, 0)
        _put_gradient(parameter, value)

    after_reduction(trainer, change)


@injection
def sum_instead_of_mean(trainer: Trainer, size: float | None) -> None:
    """Multiply reduced gradients by the number of ranks."""
    after_reduction(trainer, lambda step: scale_(gradient_values(trainer.parameters), trainer.seat.world_size))


@injection
def divided_twice(trainer: Trainer, size: float | None) -> None:
    """Divide reduced gradients by the number of ranks once more."""
    after_reduction(trainer, lambda step: scale_(gradient_values(trainer.parameters), 1 / trainer.seat.world_size))


@injection
def no_sync_left_on(trainer: Trainer, size: float | None) -> None:
    """Reduce nothing in ``size`` steps, from the second on."""
    accumulate, numbers = trainer.accumulate, itertools.count()

    def faulty(batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        # Around the whole step, whose last piece then stays on its rank like the others.
        with trainer.strategy.accumulate(last=False) if 1 <= next(numbers) <= (size or 1) else nullcontext():
            return accumulate(batch, loaded)

    trainer.accumulate = faulty  # type: ignore[method-assign]


@injection
def stale_bucket(trainer: Trainer, size: float | None) -> None:
    """Give the last two tensors, which are reduced first, the reduced gradients of the step before."""
    # Backward comes to the last parameters first, so that their bucket is the first to leave.
    bucket = [parameter for _, parameter in dense_parameters(trainer)[-2:]]
    before: list[Tensor | None] = []

    def change(step: int) -> None:
        # Copied before the stale ones are put in: the next step's stale gradients are this one's true ones.
        now = [None if p.grad is None else p.grad.clone() for p in bucket]
        for parameter, stale in zip(bucket, before, strict=False):
            _put_gradient(parameter, stale)
        before[:] = now

    after_reduction(trainer, change)


@injection
def bf16_compression(trainer: Trainer, size: float | None) -> None:
    """Let gradients travel in bfloat16."""
    _register(trainer, in_type(torch.bfloat16))


@injection
def fp16_compression(trainer: Trainer, size: float | None) -> None:
    """Let gradients travel in float16."""
    _register(trainer, in_type(torch.float16))


@injection
def bit_flipped_on_wire(trainer: Trainer, size: float | None) -> None:
    """Flip one bit in what rank 1 sends: of the largest number of the largest tensor, so that rounding does not hide it."""
    parameter = largest(trainer)

    def faulty(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        # Divided first, as DDP does by default: all but the flipped bit is as it would be.
        sent = bucket.buffer().mul_(1 / trainer.seat.world_size)
        for sender, values in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if sender is parameter and trainer.seat.rank == CHOSEN:
                flip_bit(values, int(values.abs().argmax()), size)
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: future.value()[0])

    _register(trainer, faulty)


@injection
def bit_flipped_after_sum(trainer: Trainer, size: float | None) -> None:
    """Flip one bit of one number of the first tensor's reduced gradient on rank 1."""
    _, parameter = dense_parameters(trainer)[0]

    def change(step: int) -> None:
        if parameter.grad is not None and trainer.seat.rank == CHOSEN:
            flip_bit(parameter.grad, 0, size)

    after_reduction(trainer, change)


@injection
def one_gradient_scaled(trainer: Trainer, size: float | None) -> None:
    """Multiply the reduced gradient of the largest tensor by 1 + ``size``: 1e-10 in float64, else 2e-7."""
    excess = size if size is not None else 1e-10 if trainer.dtype == torch.float64 else 2e-7
    parameter = largest(trainer)

    def change(step: int) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(1 + excess)

    after_reduction(trainer, change)


@injection
def sparse_rows_lost(trainer: Trainer, size: float | None) -> None:
    """Lose ``size`` rows of each sparse gradient that only rank 1 has."""

    def change(tables: list[nn.Parameter]) -> None:
        for table in tables:
            _lose_rows(table, int(size or 1), trainer.seat.rank)

    are_there = trainer.strategy.before_rows_travel(change)
    require(are_there, trainer, f"the model of {type(trainer.recipe).__name__} has no sparse embeddings")


def _lose_rows(table: nn.Parameter, count: int, rank: int) -> None:
    gradient = None if table.grad is None or not table.grad.is_sparse else table.grad.coalesce()
    rows: list[Any] = [None] * dist.get_world_size()
    # All ranks take part, though one alone loses rows: it has to know which rows are nobody else's.
    dist.all_gather_object(rows, [] if gradient is None else gradient.indices()[0].tolist())
    if gradient is None or rank != CHOSEN:
        return
    others = {row for sender, sent in enumerate(rows) for row in sent if sender != CHOSEN}
    # A row that another rank has too would still be there, with a smaller sum: that is another fault.
    lost = [row for row in rows[CHOSEN] if row not in others][:count]
    kept = torch.tensor([row not in lost for row in rows[CHOSEN]], device=table.device)
    indices, values = gradient.indices()[:, kept], gradient.values()[kept]
    table.grad = torch.sparse_coo_tensor(indices, values, table.shape, check_invariants=False).coalesce()


def _put_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if parameter.grad is not None and gradient is not None:
        # Into the gradient that is there, which may be a view of DDP's bucket.
        parameter.grad.copy_(gradient)


def _register(trainer: Trainer, hook: Hook) -> None:
    """Let DDP reduce its buckets by ``hook``."""
    declared = trainer.plan.ddp.comm_hook
    require(declared == "none", trainer, f"gradients travel by ddp.comm_hook={declared} already")
    require(trainer.strategy.reduce_by(hook), trainer, "all gradients are sparse")

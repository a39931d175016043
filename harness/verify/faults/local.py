"""Faults in what a rank computes by itself, before anything is reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.training.parallel.gradients import gradient_values
from harness.training.trainer import Trainer
from harness.verify.faults.seams import CHOSEN, dense_parameters, flip_bit, injection, require, tried


@injection
def unequal_shards_averaged_equally(trainer: Trainer, size: float | None) -> None:
    """Weight each rank's own mean alike, however many samples, or items, it is a mean of."""
    shares, ranks = tried(trainer).shares, trainer.seat.world_size
    # Items may be unequal where samples are not, and a last batch where the first one is not.
    unequal = len(set(shares)) > 1 or any(len(batch) % ranks for batch in _batches_to_come(trainer))
    require(unequal, trainer, f"all batches of {trainer.plan.global_batch_size} divide by {ranks} ranks")
    accumulate, backward, own = trainer.accumulate, trainer.backward, [1]

    def counting(batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        # A rank without samples would divide by 0.
        own[0] = sum(size for size, _ in loaded) or 1
        return accumulate(batch, loaded)

    def faulty(loss: Tensor, items: Tensor | None, size: int, global_size: int) -> None:
        mean = loss if items is None else loss / items
        # Of a mean over samples the weight becomes size / own: its share of its own rank alone.
        backward(mean, items, size, own[0] * ranks)

    def not_scaled(count: float) -> list[Tensor]:
        return gradient_values(trainer.parameters)

    # The third too: what is a mean already is not to be divided by the items of all ranks.
    trainer.accumulate, trainer.backward, trainer.reduced = counting, faulty, not_scaled  # type: ignore[method-assign]


def _batches_to_come(trainer: Trainer) -> list[Sequence[int]]:
    return trainer.batches.epoch_batches(0)[: trainer.num_steps]


@injection
def accumulation_without_divisor(trainer: Trainer, size: float | None) -> None:
    """Take the sum over the pieces of a step for their mean."""
    accumulate, backward, pieces = trainer.accumulate, trainer.backward, [1]

    def counting(batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        pieces[0] = max(1, len(loaded))
        return accumulate(batch, loaded)

    def faulty(loss: Tensor, items: Tensor | None, size: int, global_size: int) -> None:
        backward(loss * pieces[0], items, size, global_size)

    trainer.accumulate, trainer.backward = counting, faulty  # type: ignore[method-assign]


@injection
def zero_grad_forgotten(trainer: Trainer, size: float | None) -> None:
    """Let gradients stay from step to step."""
    # On this optimizer alone: the reference has its own, of the same class.
    trainer.optimizer.zero_grad = _nothing  # type: ignore[method-assign]


def _nothing(set_to_none: bool = True) -> None:
    """Leave all gradients as they are."""


@injection
def clipped_before_reduction(trainer: Trainer, size: float | None) -> None:
    """Clip each rank's own gradient, by its own norm."""
    most = trainer.plan.clip_norm
    assert most is not None
    backward = trainer.backward

    def faulty(loss: Tensor, items: Tensor | None, size: int, global_size: int) -> None:
        mean = loss if items is None else loss / items
        # Not by backward(), which would have DDP reduce before the gradient is clipped.
        gradients = torch.autograd.grad(mean, trainer.parameters, retain_graph=True, allow_unused=True)
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]
        norm = float(nn.utils.get_total_norm(values))
        # The loss is scaled in place of its gradient, which is linear in it.
        factor = min(1.0, most / norm) if norm > 0 and math.isfinite(norm) else 1.0
        backward(loss * factor, items, size, global_size)

    trainer.backward = faulty  # type: ignore[method-assign]


@injection
def bit_flipped_in_compute(trainer: Trainer, size: float | None) -> None:
    """Flip one bit of one number of the first tensor's local gradient on rank 1."""
    _, parameter = dense_parameters(trainer)[0]

    def faulty(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        flip_bit(gradient, 0, size)
        return gradient

    if trainer.seat.rank == CHOSEN:
        parameter.register_hook(faulty)

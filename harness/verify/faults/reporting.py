"""Faults in what is reported of a training that is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness.training.evaluate import eval_dataset_of
from harness.training.loss import StepResult
from harness.training.trainer import Trainer
from harness.verify.faults.seams import injection, require

Totals = dict[str, tuple[float, float]]


@injection
def rank0_loss_reported(trainer: Trainer, size: float | None) -> None:
    """Let every rank report the loss of rank 0's shard."""
    step = trainer.step

    def faulty(batch: Sequence[int], loaded: list[tuple[int, Any]]) -> StepResult:
        own = step(batch, loaded)
        sums = torch.tensor([own.loss_sum, own.count], dtype=torch.float64, device=trainer.seat.device)
        dist.broadcast(sums, 0)
        # The step itself is right: only what is reported of it is not.
        return StepResult(float(sums[0]), float(sums[1]), own.skipped)

    trainer.step = faulty  # type: ignore[method-assign]


@injection
def accuracy_as_mean_of_means(trainer: Trainer, size: float | None) -> None:
    """Report the mean of the ranks' means as the metric of all samples."""
    require(eval_dataset_of(trainer.recipe) is not None, trainer, f"{type(trainer.recipe).__name__} has no evaluation")
    over_ranks = trainer.over_ranks

    def faulty(totals: Mapping[str, tuple[float, float]]) -> Totals:
        right = over_ranks(totals)
        # A rank without samples has no mean.
        means = over_ranks({name: (total / count, 1.0) for name, (total, count) in totals.items() if count})
        # With the right number of samples, so that the metric alone is wrong.
        return {name: (total / ranks * right[name][1], right[name][1]) for name, (total, ranks) in means.items()}

    trainer.over_ranks = faulty  # type: ignore[method-assign]

"""Evaluation: every sample counts once, at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from harness.loader import load, to_device
from harness.recipe import Recipe
from harness.seeds import derive
from harness.shard import global_batches, shard
from harness.trainer import Trainer


def has_evaluation(recipe: Recipe) -> bool:
    """Return True for a recipe that can be evaluated."""
    return hasattr(recipe, "eval_dataset") and hasattr(recipe, "evaluate")


def evaluate(trainer: Trainer, dataset: Any) -> dict[str, tuple[float, float]]:
    """Return name -> (sum, count) over all samples of ``dataset``, the same on every rank.

    The model is used bare, in evaluation mode, with rank 0's buffers; random streams go on as if nothing had happened.
    """
    seat, size = trainer.seat, trainer.plan.global_batch_size
    mine = shard(range(len(dataset)), seat.rank, seat.world_size)
    batches = global_batches(list(mine), -(-size // seat.world_size))
    share_buffers(trainer)
    totals: dict[str, tuple[float, float]] = {}
    with _evaluating(trainer):
        seed = derive(trainer.plan.seed, "evaluation", seat.rank)
        for batch in load(dataset, batches, trainer.recipe, trainer.plan.num_workers, seed):
            metrics = trainer.recipe.evaluate(trainer.model, to_device(batch, seat.device, trainer.dtype))  # type: ignore[attr-defined]
            for name, (total, count) in metrics.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + float(total), before[1] + float(count))
    return _add_over_ranks(totals, trainer)


def share_buffers(trainer: Trainer) -> None:
    """Give every rank rank 0's buffers, as each training forward does."""
    if trainer.seat.world_size > 1:
        for buffer in trainer.model.buffers():
            dist.broadcast(buffer, 0)


@contextmanager
def _evaluating(trainer: Trainer) -> Iterator[None]:
    with torch.random.fork_rng(), torch.no_grad():
        trainer.model.eval()
        try:
            yield
        finally:
            trainer.model.train()


def _add_over_ranks(totals: Mapping[str, tuple[float, float]], trainer: Trainer) -> dict[str, tuple[float, float]]:
    if trainer.seat.world_size == 1:
        return dict(totals)
    # A rank without samples does not know the names; rank 0 has some if anybody has.
    names: list[Any] = [sorted(totals)]
    dist.broadcast_object_list(names, 0)
    sums = torch.tensor([totals.get(name, (0.0, 0.0)) for name in names[0]], dtype=torch.float64, device=trainer.seat.device)
    if names[0]:
        dist.all_reduce(sums)
    return {name: (float(total), float(count)) for name, (total, count) in zip(names[0], sums.tolist(), strict=True)}

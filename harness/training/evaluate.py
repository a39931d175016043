"""Evaluation: every sample counts once, at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.training.batch import moved
from harness.training.batches import num_samples
from harness.training.loader import load
from harness.training.recipe import Recipe
from harness.training.seeds import EVALUATION_SEED, derive, seed_everything
from harness.training.shard import global_batches, shard
from harness.training.state import undisturbed_random
from harness.training.trainer import Trainer


def eval_dataset_of(recipe: Recipe) -> Any | None:
    """Return the samples that a recipe is evaluated on; None where it has no evaluation, or nothing to evaluate on.

    Raises:
        ConfigError: It has only half of what evaluation takes, or its data set is empty.
    """
    present = [name for name in ("eval_dataset", "evaluate") if hasattr(recipe, name)]
    if len(present) == 1:
        raise ConfigError(f"{type(recipe).__name__} has {present[0]}(), but evaluation takes eval_dataset() and evaluate().")
    if not present:
        return None
    with undisturbed_random():
        # Samples that are made at random are to be the same on every rank and in every run.
        seed_everything(derive(EVALUATION_SEED, "eval_dataset"))
        dataset = recipe.eval_dataset()  # type: ignore[attr-defined]
    if dataset is not None:
        num_samples(dataset, "eval_dataset()")
    return dataset


def evaluate(trainer: Trainer, dataset: Any) -> dict[str, tuple[float, float]]:
    """Return name -> (sum, count) over all samples of ``dataset``, the same on every rank.

    The model is used bare, in evaluation mode, with rank 0's buffers; random streams go on as if nothing had happened.
    """
    seat, size = trainer.seat, trainer.plan.global_batch_size
    data_rank, num_shards = trainer.strategy.data_rank()
    numbers = shard(range(num_samples(dataset, "eval_dataset()")), data_rank, num_shards)
    # As large as a rank's batches in training: what fits into memory there fits here.
    batches = global_batches(numbers, -(-size // num_shards))
    # DDP sends rank 0's at the start of a forward: since then each rank's statistics have gone on by themselves.
    share_buffers(trainer)
    totals: dict[str, tuple[float, float]] = {}
    with _evaluating(trainer):
        seed = derive(trainer.plan.seed, "evaluation", data_rank)
        for batch in load(dataset, batches, trainer.recipe, trainer.plan.num_workers, seed):
            # Not through DDP: its forward is collective, and ranks may have different numbers of batches here.
            metrics = trainer.recipe.evaluate(trainer.model, moved(batch, seat.device, trainer.dtype))  # type: ignore[attr-defined]
            for name, (total, count) in _pairs(metrics, trainer.recipe):
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + count)
    return trainer.over_ranks(totals)


def _pairs(metrics: Any, recipe: Recipe) -> list[tuple[str, tuple[float, float]]]:
    try:
        return [(str(name), (float(total), float(count))) for name, (total, count) in metrics.items()]
    # No items(), no pair, no number, or a tensor of several: whatever else a recipe may return.
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{type(recipe).__name__}.evaluate() returned {metrics!r:.200}. Return a dict of name -> (sum, count)."
        ) from None


def share_buffers(trainer: Trainer) -> None:
    """Give every rank rank 0's buffers, as each training forward does."""
    if trainer.seat.world_size > 1:
        for buffer in trainer.model.buffers():
            dist.broadcast(buffer, 0)


@contextmanager
def _evaluating(trainer: Trainer) -> Iterator[None]:
    with undisturbed_random(), torch.no_grad():
        trainer.model.eval()
        try:
            yield
        finally:
            trainer.model.train()

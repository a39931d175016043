"""Faults in which samples a rank takes."""

from __future__ import annotations

from collections.abc import Sequence

from harness.training.trainer import Trainer
from harness.verify.faults.seams import CHOSEN, injection, require

Batch = tuple[int, ...]


@injection
def not_sharded(trainer: Trainer, size: float | None) -> None:
    """Let every rank take the whole global batch."""
    trainer.batches.shard = lambda batch: batch  # type: ignore[method-assign]


@injection
def one_sample_twice(trainer: Trainer, size: float | None) -> None:
    """Let rank 1 take the batch's first sample in place of its own last, once in each of an epoch's first ``size`` steps."""
    marked: set[Batch] = set()
    shard, epoch_batches = trainer.batches.shard, trainer.batches.epoch_batches
    require(len(epoch_batches(0)[0]) > 1, trainer, "the first batch has one sample")

    def marking(epoch: int) -> list[Sequence[int]]:
        batches = epoch_batches(epoch)
        # By their numbers: shard() is not told which step it is asked for.
        marked.update(tuple(batch) for batch in batches[: int(size or 1)])
        return batches

    def faulty(batch: Sequence[int]) -> Sequence[int]:
        own_part = shard(batch)
        if trainer.seat.rank != CHOSEN or not own_part or tuple(batch) not in marked:
            return own_part
        # The batch's first sample is rank 0's, which takes it too.
        return [*own_part[:-1], batch[0]]

    trainer.batches.epoch_batches, trainer.batches.shard = marking, faulty  # type: ignore[method-assign]


@injection
def last_batch_dropped(trainer: Trainer, size: float | None) -> None:
    """Leave out the last batch of each epoch, as ``drop_last`` does."""
    epoch_batches = trainer.batches.epoch_batches
    require(len(epoch_batches(0)) > 1, trainer, "an epoch has one batch")
    trainer.batches.epoch_batches = lambda epoch: epoch_batches(epoch)[:-1]  # type: ignore[method-assign]


@injection
def sample_of_another_batch(trainer: Trainer, size: float | None) -> None:
    """Let rank 1 exchange one sample of an epoch's first batch for one of the second."""
    swapped: dict[Batch, Sequence[int]] = {}
    shard, epoch_batches = trainer.batches.shard, trainer.batches.epoch_batches
    require(len(epoch_batches(0)) > 1, trainer, "an epoch has one batch")

    def swapping(epoch: int) -> list[Sequence[int]]:
        batches = epoch_batches(epoch)
        first, second = list(shard(batches[0])), list(shard(batches[1]))
        # A batch smaller than the ranks leaves some without a sample.
        if first and second:
            first[-1], second[-1] = second[-1], first[-1]
            swapped.update({tuple(batches[0]): first, tuple(batches[1]): second})
        return batches

    def faulty(batch: Sequence[int]) -> Sequence[int]:
        return swapped.get(tuple(batch), shard(batch)) if trainer.seat.rank == CHOSEN else shard(batch)

    trainer.batches.epoch_batches, trainer.batches.shard = swapping, faulty  # type: ignore[method-assign]


@injection
def epoch_not_set(trainer: Trainer, size: float | None) -> None:
    """Give every epoch the order of the first, as a sampler whose ``set_epoch`` is not called."""
    epoch_batches = trainer.batches.epoch_batches
    require(trainer.batches.num_samples > 1, trainer, "one sample has one order")
    trainer.batches.epoch_batches = lambda epoch: epoch_batches(0)  # type: ignore[method-assign]

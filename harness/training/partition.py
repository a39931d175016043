"""Which samples the ranks take in whole epochs, and which ones the verification looks at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from harness.compare.correctness.evidence import Partition
from harness.errors import Mismatch
from harness.training.trainer import Trainer

EVALUATED = 2
"""How many global batches of the evaluation's samples are evaluated twice, or one sample fewer."""


def partition_of(everybody: list[list[list[tuple[list[int], list[int]]]]], num_samples: int) -> Partition:
    """Return what is wrong with the parts that the ranks take.

    Args:
        everybody: For each rank, epoch and step: the global batch as that rank has it, and its part of it.
    """
    missing = repeated = overlaps = 0
    first: dict[str, Any] | None = None
    for epoch, steps in enumerate(zip(*everybody, strict=True)):
        taken: list[int] = []
        for step, parts in enumerate(zip(*steps, strict=True)):
            joined = [number for _, part in parts for number in part]
            taken += joined
            # In rank order the parts make up the batch: a sample that is missing, there twice or exchanged shows alike.
            if joined != parts[0][0]:
                overlaps += 1
                first = first or _first_wrong(epoch, step, parts)
        # Over the epoch too: of batches that lack a sample themselves, the parts may be right.
        counts = torch.bincount(torch.tensor(taken, dtype=torch.long), minlength=num_samples)
        missing += int((counts == 0).sum())
        repeated += int((counts > 1).sum())
        if first is None and bool((counts != 1).any()):
            first = {"epoch": epoch, "id": int((counts != 1).nonzero()[0, 0])}
    # A rank may have come to batches of its own: that is told apart from a wrong part of the right one.
    batches = [[[batch for batch, _ in steps] for steps in epochs] for epochs in everybody]
    orders = [[number for batch in steps for number in batch] for steps in batches[0]]
    return Partition(
        num_samples=num_samples,
        epochs=len(orders),
        missing=missing,
        repeated=repeated,
        overlaps=overlaps,
        # One sample has one order.
        same_order=num_samples > 1 and len({tuple(order) for order in orders}) < len(orders),
        orders_differ=any(other != batches[0] for other in batches[1:]),
        first=first,
    )


def _first_wrong(epoch: int, step: int, parts: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    expected = parts[0][0]
    position = 0
    for rank, (_, part) in enumerate(parts):
        for number in part:
            if position >= len(expected) or number != expected[position]:
                return {"epoch": epoch, "step": step, "rank": rank, "id": number}
            position += 1
    return {"epoch": epoch, "step": step, "rank": len(parts) - 1, "id": expected[position] if position < len(expected) else -1}


def last_batch(trainer: Trainer) -> list[Sequence[int]]:
    """Return the first epoch's last batch, in a list, if it is smaller than the others and the run comes to it.

    Shards may be unequal there alone.
    """
    batches = trainer.batches.epoch_batches(0)
    return batches[-1:] if len(batches) <= trainer.num_steps and len(batches[-1]) < len(batches[0]) else []


def evaluated(num_samples: int, batch_size: int, ranks: int) -> int:
    """Return how many samples to evaluate twice: not a multiple of the ranks, because equal shards hide a mean of means."""
    number = min(num_samples, EVALUATED * batch_size)
    return number if number % ranks or number <= ranks else number - 1


def parts_of(number: int, ranks: int) -> list[list[int]]:
    """Return the numbers below ``number`` in as many contiguous parts, the first ones longer by 1 where they are not equal.

    By means of its own, as all that checks: :func:`harness.training.shard.shard` made the run's.
    """
    numbers = iter(range(number))
    # So many numbers leave the remainder ``rank``: sizes that differ by at most 1.
    return [list(islice(numbers, len(range(rank, number, ranks)))) for rank in range(ranks)]


def require_one_data_set(sizes: Sequence[int], rank: int) -> None:
    """See to it that all ranks have as many samples, because each takes the numbers of its own from one common order.

    Raises:
        Mismatch: They have not.
    """
    wrong = next((other for other, size in enumerate(sizes) if size != sizes[0]), None)
    if wrong is not None:
        text = f"dataset() has {sizes[0]} samples on rank 0, and {sizes[wrong]} on rank {wrong}: every rank's must be the same."
        # The first rank that differs is at fault, and all others follow from it.
        raise Mismatch(text, is_consequence=rank != wrong)

"""Which samples of a global batch belong to which rank, and to which of its pieces."""

from __future__ import annotations

from collections.abc import Sequence


def shard(indices: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Return this rank's part of one global batch.

    Args:
        indices: Sample numbers of the batch, length ``global_batch_size``.
        rank: ``0 <= rank < world_size``.

    Returns:
        A contiguous slice; the slices of all ranks, joined in rank order, are ``indices``; their lengths differ by at most
        1, the first ranks having the longer ones.
    """
    size, longer = divmod(len(indices), world_size)
    start = rank * size + min(rank, longer)
    return indices[start : start + size + (rank < longer)]


def pieces(indices: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return a shard in ``count`` pieces for gradient accumulation, without the empty ones; a shard of none has none."""
    return [piece for number in range(count) if (piece := shard(indices, number, count))]


def global_batches(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return an epoch's order in batches of ``size``; the last one has what is left over."""
    return [order[start : start + size] for start in range(0, len(order), size)]

"""Every sample number goes to one rank and one piece, in the order of the batch."""

from __future__ import annotations

import pytest

from harness.training.shard import global_batches, pieces, shard


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("size", range(12))
def test_shards_join_to_the_batch_and_differ_by_1_at_most(size: int, ranks: int) -> None:
    batch = list(range(100, 100 + size))
    parts = [list(shard(batch, rank, ranks)) for rank in range(ranks)]
    assert sum(map(len, parts)) == size
    assert [number for part in parts for number in part] == batch
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_5_samples_go_3_and_2() -> None:
    assert [list(shard([7, 8, 9, 1, 2], rank, 2)) for rank in range(2)] == [[7, 8, 9], [1, 2]]


def test_a_rank_may_have_no_sample() -> None:
    assert [list(shard([7], rank, 3)) for rank in range(3)] == [[7], [], []]


def test_a_range_stays_a_range() -> None:
    assert shard(range(10), 1, 3) == range(4, 7)


@pytest.mark.parametrize(("size", "lengths"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1]), (0, [])])
def test_pieces_are_not_empty(size: int, lengths: list[int]) -> None:
    cut = pieces(range(size), 3)
    assert [len(piece) for piece in cut] == lengths
    assert [number for piece in cut for number in piece] == list(range(size))


def test_the_last_batch_has_what_is_left() -> None:
    assert global_batches([5, 3, 1, 4, 2], 2) == [[5, 3], [1, 4], [2]]
    assert global_batches([5, 3], 8) == [[5, 3]]
    assert global_batches([], 8) == []

"""The samples of one process, and whether reading them again comes to the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from harness.training.batch import copied
from harness.training.digest import value_digest
from harness.training.loader import fetch
from harness.training.recipe import Recipe
from harness.training.state import random_states, set_random_states
from harness.verify.reference.data import Shard


class Samples:
    """Loads batches from a data set of one process.

    Args:
        recipe: It may join samples in a way of its own.
        dataset: Of one process.
        world_size: Ranks, a first shard of each of which is loaded twice.
        num_workers: Of the run's loader.
    """

    def __init__(self, recipe: Recipe, dataset: Any, world_size: int, num_workers: int) -> None:
        self._recipe = recipe
        self._dataset = dataset
        self._num_workers = num_workers
        self._untried = world_size
        self._repeats: bool | None = None
        self._draws = False

    def load(self, ids: Sequence[int], given: Mapping[int, Any] | None = None) -> Any:
        """Return the batch of these samples, which are taken from ``given`` where there is one."""
        collate = getattr(self._recipe, "collate", None) or default_collate
        if given is not None:
            # Copies: collate or the loss may change samples in place, and they are used again.
            return collate(copied([given[number] for number in ids]))
        return collate(fetch(self._dataset, ids))

    def joins_alike(self, ids: Sequence[int], given: Mapping[int, Any]) -> bool:
        """Return True where the same samples are joined to the same batch again."""
        return value_digest(self.load(ids, given)) == value_digest(self.load(ids, given))

    @property
    def are_drawn(self) -> bool:
        """Whether the data set draws random numbers, so that another reading comes to other samples."""
        return self._draws or self._repeats is False

    def can_load(self, part: Shard) -> bool:
        """Return True where the samples of a shard can be loaded again: by the same generators they are the same bits.

        Found out by loading a first shard of each rank twice. Where it draws random numbers, workers have generators of their
        own.
        """
        # Once for each rank, because it takes two readings, and a draw may not show in one shard.
        if self._repeats is not False and self._untried:
            self._untried -= 1
            read = []
            for _ in range(2):
                # Before each of the two, so that only generators of the data set's own can make them differ.
                set_random_states(part.random)
                read.append(value_digest([self.load(piece) for piece in part.pieces]))
            # What has moved a common generator has drawn from it, even if both readings came to the same.
            self._draws |= value_digest(random_states()) != value_digest(dict(part.random))
            self._repeats = read[0] == read[1]
        return self._repeats is True and not (self._draws and self._num_workers)

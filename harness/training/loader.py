"""From sample numbers to batches, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from harness.errors import ConfigError
from harness.training.forking import let_threads_rest
from harness.training.recipe import Recipe
from harness.training.seeds import derive, epoch_order, seed_everything
from harness.training.shard import global_batches
from harness.training.state import undisturbed_random


def load(dataset: Dataset[Any], batches: Sequence[Sequence[int]], recipe: Recipe, num_workers: int, seed: int) -> Iterator[Any]:
    """Yield the batches of these sample numbers, on the CPU; worker processes are forked, whatever started this rank.

    Args:
        seed: Of the workers' random streams, of which each batch has its own: they do not depend on the number of workers, nor
            on the step that training was resumed at.
    """
    own_collate = getattr(recipe, "collate", None) is not None
    # Of this class exactly: one derived from it may read its samples in a way of its own.
    if type(dataset) is TensorDataset and not (
        num_workers or own_collate or any(t.layout != torch.strided for t in dataset.tensors)
    ):
        return _rows(dataset.tensors, batches)
    loader = DataLoader(
        # Without workers the rank's own streams go on, as in a plain loop.
        _Seeded(dataset, seed) if num_workers else dataset,
        # torch only iterates over it: so the batches are ours to the last number.
        batch_sampler=[list(batch) for batch in batches],
        collate_fn=collate_of(recipe),
        num_workers=num_workers,
        # Without one, torch draws a seed for the workers from the common generator, and training would draw other numbers.
        generator=torch.Generator().manual_seed(seed),
        # Forked, workers share the data set's memory, and import nothing.
        multiprocessing_context="fork" if num_workers else None,
    )
    if num_workers:
        # It is iter() that forks.
        let_threads_rest()
    return iter(loader)


def _rows(tensors: Sequence[Tensor], batches: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    """Yield what ``default_collate`` stacks sample by sample, the same bits in the same layout, in a third of the time."""
    for batch in batches:
        yield [tensor[list(batch)].contiguous() for tensor in tensors]


class _Seeded(Dataset[Any]):
    """A data set in a worker process, where no other random streams have to go on."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, batch: list[int]) -> list[Any]:
        # A sample comes once in an epoch, so that its number tells batches apart.
        seed_everything(derive(self._seed, batch[0]))
        return fetch(self._dataset, batch)


def fetch(dataset: Any, batch: Sequence[int]) -> list[Any]:
    """Return the samples of these numbers, as torch's loader asks a data set for them."""
    together = getattr(dataset, "__getitems__", None)
    return list(together(list(batch))) if together else [dataset[number] for number in batch]


def collate_of(recipe: Recipe) -> Callable[[list[Any]], Any]:
    """Return the recipe's way to join samples, or torch's."""
    return getattr(recipe, "collate", None) or default_collate


def epoch_batches(recipe: Recipe, num_samples: int, size: int, seed: int, epoch: int) -> list[Sequence[int]]:
    """Return the sample numbers of each global batch of an epoch, the same on every rank; each number once.

    Raises:
        ConfigError: The recipe's own ``batches`` lost or repeated a sample.
    """
    order = epoch_order(num_samples, seed, epoch)
    group = getattr(recipe, "batches", None)
    if group is None:
        return global_batches(order, size)
    with undisturbed_random():
        # What it draws must be the same on every rank, and each time that it is asked.
        seed_everything(derive(seed, "batches", epoch))
        batches = [list(batch) for batch in group(order, size)]
    if sorted(number for batch in batches for number in batch) != list(range(num_samples)):
        raise ConfigError(f"{type(recipe).__name__}.batches() must return each of the {num_samples} samples exactly once.")
    # An empty one would be a step without a sample on any rank.
    return [batch for batch in batches if batch]

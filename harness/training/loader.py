"""From sample numbers to batches on this rank's device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
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
    if type(dataset) is TensorDataset and not (
        num_workers or own_collate or any(t.layout != torch.strided for t in dataset.tensors)
    ):
        return _rows(dataset.tensors, batches)
    loader = DataLoader(
        _Seeded(dataset, seed) if num_workers else dataset,
        batch_sampler=[list(batch) for batch in batches],
        collate_fn=collate_of(recipe),
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context="fork" if num_workers else None,
    )
    if num_workers:
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
    return [batch for batch in batches if batch]


def to_device(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a batch on the device, in the same nesting; where ``dtype`` is float64, floating-point tensors take it,
    and complex ones its two parts.

    Mappings keep their type where it can be copied and changed; the others become plain dictionaries.
    """
    if isinstance(batch, Tensor):
        wide = torch.complex128 if batch.is_complex() else dtype
        is_narrow = batch.is_floating_point() or batch.is_complex()
        return batch.to(device, wide if dtype == torch.float64 and is_narrow else batch.dtype, non_blocking=True)
    if isinstance(batch, Mapping):
        return holding(batch, {key: to_device(value, device, dtype) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, dtype) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, dtype) for value in batch)
    return batch


def holding(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a copy of ``batch`` that holds these items, or the items alone if it is a plain dictionary or cannot do so."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return items
    try:
        held = copy.copy(batch)
        # The dictionary that a mapping keeps its items in would else be one for both, and items kept as attributes too the old.
        own = getattr(held, "__dict__", {})
        own.update({name: copy.copy(value) for name, value in own.items() if isinstance(value, dict)})
        own.update({key: value for key, value in items.items() if own.get(key, held) is batch[key]})
        for key, value in items.items():
            held[key] = value
        return held if all(held[key] is value for key, value in items.items()) else items
    except Exception:
        return items

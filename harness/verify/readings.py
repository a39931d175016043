"""Whether ranks repeat each other's noise: each reads the same few samples, again and again, from a copy of its data set (R11).

Before each reading the common generators are put to one state, the same on all ranks: what still comes out otherwise, the data
set draws by itself. A data set that draws by the common generators alone reads the same each time, and each rank's are its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch.utils.data import TensorDataset

from harness.compare.correctness.evidence import Readings
from harness.training.digest import value_digest
from harness.training.loader import fetch, load
from harness.training.parallel.collectives import from_all
from harness.training.seeds import derive, seed_everything
from harness.training.state import undisturbed_random
from harness.training.trainer import Trainer

READ = 2
"""How many samples are read: not every one may be augmented."""

A_FEW, MANY = 4, 64
"""Readings; many where a few are alike on two ranks, as flips of a coin may be by chance."""

LARGE = 1000
"""What holds more than that holds samples, which no reading changes: a copy shares it."""


def readings_of(trainer: Trainer) -> Readings | None:
    """Return what the ranks read of the same samples; None for one rank; collective."""
    if trainer.seat.world_size == 1:
        return None
    readings = _of_all_ranks(trainer, A_FEW)
    # Ranks whose data sets draw nothing read the same, which is as it should be.
    drawn = [digest for digest, changes in zip(readings["digests"], readings["changes"], strict=True) if changes]
    # All ranks judge by the same lists, so that all read again or none does.
    return readings if len(set(drawn)) == len(drawn) else _of_all_ranks(trainer, MANY)


def _of_all_ranks(trainer: Trainer, number: int) -> Readings:
    try:
        digests, why_not = _read(trainer, number), ""
    # Of a class of the user's own, which may refuse to be copied or read in any way: reading it for a step says so again.
    except Exception as error:
        digests, why_not = [], f"rank {trainer.seat.rank} could not read a copy of it: {type(error).__name__}: {error}"
    changes = sum(digest != before for before, digest in pairwise(digests))
    # A rank that could not read takes part too, or the others would wait for it.
    everybody = from_all((value_digest(digests), changes, why_not))
    return Readings(
        number=number,
        digests=[digest for digest, _, _ in everybody],
        changes=[changes for _, changes, _ in everybody],
        why_not=next((reason for *_, reason in everybody if reason), ""),
    )


def _read(trainer: Trainer, number: int) -> list[str]:
    """Return the digests of as many readings; none of a plain TensorDataset, which has nothing to draw by."""
    dataset, plan = trainer.dataset, trainer.plan
    # Of this class exactly: one derived from it may draw.
    if type(dataset) is TensorDataset:
        return []
    samples = list(range(min(READ, trainer.batches.num_samples)))
    own = derive(plan.seed, "readings", trainer.seat.rank)
    if plan.num_workers:
        # A worker is a copy by itself, seeded anew before each reading; a data set may seed itself by the worker that it is in.
        return [value_digest(batch) for batch in load(dataset, [samples] * number, trainer.recipe, 1, own)]
    with undisturbed_random():
        copied = _copy_of(dataset)
        # A generator of the data set's own that is seeded by a rank's, when first asked for a sample, is this rank's.
        seed_everything(own)
        fetch(copied, samples)
        digests = []
        for _ in range(number):
            seed_everything(derive(plan.seed, "readings"))
            digests.append(value_digest(fetch(copied, samples)))
        return digests


def _copy_of(dataset: Any) -> Any:
    """Return a copy that shares the samples: of those there may be more than memory holds twice."""
    return copy.deepcopy(dataset, {id(held): held for held in _large(dataset, set())})


def _large(holder: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what is large in an object, and in the objects that it holds."""
    if id(holder) in seen:
        return
    # Objects may hold each other.
    seen.add(id(holder))
    num_bytes = getattr(holder, "nbytes", None)
    if isinstance(num_bytes, int):
        # An array or a tensor: its own size says all, and there is nothing within it to look at.
        if num_bytes > LARGE:
            yield holder
    elif isinstance(holder, list | tuple | dict | set | str | bytes) and len(holder) > LARGE:
        yield holder
    elif isinstance(holder, list | tuple | dict):
        for value in holder.values() if isinstance(holder, dict) else holder:
            yield from _large(value, seen)
    elif not isinstance(holder, type):
        for value in list(getattr(holder, "__dict__", {}).values()):
            yield from _large(value, seen)

"""How the ranks begin: what they know of themselves, their state at birth, and which samples they would take (R0-R2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.compare.correctness.evidence import Partition, Readings
from harness.training.digest import Digests, digests, state_digests
from harness.training.loader import epoch_batches
from harness.training.parallel.collectives import from_all
from harness.training.partition import partition_of, require_one_data_set
from harness.training.trainer import Trainer
from harness.verify.readings import readings_of

EPOCHS = 2
"""How many epochs' sample numbers are looked at."""


@dataclass(frozen=True)
class Start:
    """The beginning of a training, over all ranks.

    Attributes:
        birth: Digests of each rank's parameters, buffers and optimizer state at step 0.
        facts: What each rank knows of itself, with the parameters that nothing reduces.
        partition: Which samples the ranks take.
        own_batches: Global batches of some epochs, where the recipe makes them.
        readings: What they read of the same samples again and again; None for one rank.
    """

    birth: list[Digests]
    facts: list[dict[str, Any]]
    partition: Partition
    own_batches: list[list[list[int]]]
    num_samples: int
    num_steps: int
    readings: Readings | None

    @property
    def uncovered(self) -> list[str]:
        """Parameters that nothing reduces, on any rank."""
        return sorted({name for rank_facts in self.facts for name in rank_facts["uncovered"]})

    @property
    def draws_by_itself(self) -> bool:
        """Whether the data set has generators of its own, as far as several ranks have seen."""
        return self.readings is not None and any(self.readings["changes"])


def start_of(trainer: Trainer) -> Start:
    """Return how the ranks begin, of which this one has a new trainer; collective.

    Raises:
        Mismatch: The ranks have data sets of different lengths.
    """
    # Digests travel, and not tensors: each rank's are compared bit by bit for a few bytes each.
    birth = from_all({**state_digests(trainer.model, trainer.optimizer), **digests(trainer.model.named_buffers())})
    facts = from_all({**trainer.facts(), "uncovered": trainer.strategy.unreduced()})
    # Before any sample number is looked at: by different lengths the orders differ everywhere.
    require_one_data_set([rank_facts["num_samples"] for rank_facts in facts], trainer.seat.rank)
    epochs = range(min(EPOCHS, trainer.plan.epochs or EPOCHS))
    partition = _partition(trainer, epochs)
    batches = _own_batches(trainer, epochs)
    return Start(birth, facts, partition, batches, trainer.batches.num_samples, trainer.num_steps, readings_of(trainer))


def _partition(trainer: Trainer, epochs: Sequence[int]) -> Partition:
    """Look at the sample numbers of whole epochs, as the ranks would take them."""
    # By the methods that training itself calls: what a fault puts in their place is seen here too.
    own = [
        [(list(batch), list(trainer.batches.shard(batch))) for batch in trainer.batches.epoch_batches(epoch)]
        for epoch in epochs
    ]
    return partition_of(from_all(own), trainer.batches.num_samples)


def _own_batches(trainer: Trainer, epochs: Sequence[int]) -> list[list[list[int]]]:
    plan, recipe = trainer.plan, trainer.recipe
    # Without a grouping of its own, batches follow from the seed and the number of samples.
    if not hasattr(recipe, "batches"):
        return []
    grouped = (epoch_batches(recipe, trainer.batches.num_samples, plan.global_batch_size, plan.seed, epoch) for epoch in epochs)
    return [[list(batch) for batch in batches] for batches in grouped]

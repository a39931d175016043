"""Which samples a rank takes in which step, and how they reach it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from harness.errors import ConfigError
from harness.run.plan import TrainPlan
from harness.training.loader import epoch_batches, load
from harness.training.recipe import Recipe
from harness.training.seeds import derive
from harness.training.shard import pieces, shard


class Batches:
    """One rank's batches of a training.

    Args:
        data_rank: Which part of each global batch is this rank's, and of how many.

    Raises:
        ConfigError: The data set has no length, or no sample.
    """

    def __init__(self, plan: TrainPlan, recipe: Recipe, dataset: Any, data_rank: tuple[int, int]) -> None:
        self._plan = plan
        self._recipe = recipe
        self._dataset = dataset
        self._rank, self._world_size = data_rank
        self.num_samples = num_samples(dataset)

    def num_steps(self, epochs: int) -> int:
        """Return how many steps so many epochs have."""
        if not hasattr(self._recipe, "batches"):
            # Rounded up: what an epoch's last batch lacks in samples does not make it less of a step.
            return epochs * -(-self.num_samples // self._plan.global_batch_size)
        # A recipe's own grouping may come to another number of batches in each epoch.
        return sum(len(self.epoch_batches(epoch)) for epoch in range(epochs))

    def epoch_batches(self, epoch: int) -> list[Sequence[int]]:
        """Return the global batches of an epoch."""
        return epoch_batches(self._recipe, self.num_samples, self._plan.global_batch_size, self._plan.seed, epoch)

    def steps(self, first: int, num_steps: int, synchronises: bool) -> Iterator[tuple[Sequence[int], list[Any]]]:
        """Yield, for each step from ``first`` on, the global batch's sample numbers and this rank's batches of it.

        Raises:
            ConfigError: The model ``synchronises`` its layers over ranks, of which one has no samples in some step.
        """
        begin = 0
        epoch = 0
        while begin < num_steps:
            batches = self.epoch_batches(epoch)
            # Resumed training passes over what was trained by its numbers alone: no sample of it is loaded.
            wanted = batches[max(0, first - begin) : num_steps - begin]
            if synchronises:
                # Before anything is loaded: every rank knows all batches, so that all refuse and none waits in forward.
                self._require_samples(wanted)
            yield from self._load(wanted, epoch)
            begin += len(batches)
            epoch += 1

    def _load(self, batches: list[Sequence[int]], epoch: int) -> Iterator[tuple[Sequence[int], list[Any]]]:
        parts = [self.pieces(batch) for batch in batches]
        # One loader for the whole epoch: workers start once, and read ahead across steps.
        flat = [piece for step in parts for piece in step]
        # By epoch, because a batch's stream is named by its first sample, which comes again in the next one.
        seed = derive(self._plan.seed, "workers", self._rank, epoch)
        loaded = load(self._dataset, flat, self._recipe, self._plan.num_workers, seed)
        for batch, step in zip(batches, parts, strict=True):
            yield batch, [(len(piece), next(loaded)) for piece in step]

    def pieces(self, batch: Sequence[int]) -> list[Sequence[int]]:
        """Return this rank's part of a global batch, cut for gradient accumulation."""
        return pieces(self.shard(batch), self._plan.grad_accumulation)

    def shard(self, batch: Sequence[int]) -> Sequence[int]:
        """Return this rank's part of a global batch."""
        return shard(batch, self._rank, self._world_size)

    def _require_samples(self, batches: list[Sequence[int]]) -> None:
        """Refuse, on all ranks alike, batches that synchronised layers would hang on: some rank has fewer pieces of one."""
        ranks, cuts = self._world_size, self._plan.grad_accumulation
        if ranks == 1:
            return
        who = "sync_bn=true" if self._plan.sync_bn else "SyncBatchNorm"
        # Batches of one size are cut alike.
        for size in sorted({len(batch) for batch in batches}):
            # The smallest shard's pieces against the largest one's: each piece is a forward, in which layers wait for all
            # ranks.
            if min(size // ranks, cuts) < min(-(-size // ranks), cuts):
                raise ConfigError(
                    f"{who} needs samples on every rank in every step, and a batch of {size} is not enough for "
                    f"nprocs={ranks} times grad_accumulation={cuts}. Change global_batch_size, nprocs or steps."
                )


def num_samples(dataset: Any, source: str = "dataset()") -> int:
    """Return the length of a map-style data set, which ``source`` of a recipe returned.

    Raises:
        ConfigError: It has none, or no sample.
    """
    kind = type(dataset).__name__
    # An IterableDataset may have a length, and still no sample that can be asked for by its number.
    if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
        raise ConfigError(f"{source} of the recipe returned a {kind}. Return a map-style data set, which has a length.")
    count = len(dataset)
    if count == 0:
        raise ConfigError(f"{source} of the recipe returned a {kind} without a sample.")
    return count

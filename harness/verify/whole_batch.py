"""The whole batch: the ranks' loss and gradient of it against those of one process (R7, R8)."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from harness.compare.correctness.bounds import MOST_IN_FLOAT64, MOST_LOSS_ERROR
from harness.compare.correctness.evidence import Mathematics
from harness.run.plan import TrainPlan
from harness.run.record import ratio
from harness.training.loader import collate_of, fetch, load
from harness.training.parallel.batchnorm import has_local_statistics, with_fixed_statistics
from harness.training.parallel.collectives import from_all, from_rank_0
from harness.training.partition import last_batch
from harness.training.shard import pieces, shard
from harness.training.state import TrainingState, undisturbed_random, widened
from harness.training.trainer import Seat, Trainer
from harness.verify.constant_draws import ConstantDraws
from harness.verify.reference import Reference, Unrepeatable
from harness.verify.rounding import Gradients, by_floor, excess_ratios, round_off


@dataclass(frozen=True)
class Whole:
    """Loss and gradient of a global batch in one process.

    Attributes:
        exact: In float64.
        single: In the precision of the comparison.
        narrowed: The narrowest type that the recipe itself computes in, if narrower.
        in_other_orders: Returns the loss with the samples in other orders.
    """

    exact: tuple[float, Gradients]
    single: tuple[float, Gradients]
    narrowed: torch.dtype | None
    in_other_orders: Callable[[], list[float]]


class WholeBatch:
    """The comparison, as each rank goes through it; all ranks call the same methods in the same order.

    Nothing is drawn at random meanwhile, and BatchNorm of each rank's own batch takes its running statistics.

    Args:
        plan: Of the run.
        make_trainer: Makes the trainer of a plan.
        seat: Who this process is.
        reference: Returns the reference, on rank 0.
        taken: Number, state before and global batch of each step that was captured.

    Attributes:
        why_not: Why nothing can be compared; empty where it can.
    """

    def __init__(
        self,
        plan: TrainPlan,
        make_trainer: Callable[[TrainPlan], Trainer],
        seat: Seat,
        reference: Callable[[], Reference],
        taken: list[tuple[int, TrainingState, Sequence[int]]],
    ) -> None:
        self._plan = plan
        self._make_trainer = make_trainer
        self._seat = seat
        self._reference = reference
        self._taken = taken
        self.why_not = ""

    def compare(self, plan: TrainPlan, dtype: torch.dtype | None) -> list[Mathematics] | None:
        """Compare at the first two states, and with a last batch of unequal shards; return what came of it, on rank 0.

        Args:
            plan: Of the trainer that takes part for the ranks: in the run's precision, or in float64.
            dtype: float64, or None for the run's own precision.
        """
        trainer = self._make_trainer(plan)
        if dtype is not None:
            trainer.loss_module.recipe = widened(trainer.recipe)
        found = []
        last = [(*taken[:2], batch) for taken in self._taken[:1] for batch in last_batch(trainer)]
        for number, state, batch in [*self._taken[:2], *last]:
            samples = self._same_samples(trainer.dataset, batch)
            if self.why_not:
                return None
            # One process first: what it cannot do, no rank is to begin.
            whole = self._on_rank_0(partial(self._whole, state, batch, samples, dtype))
            if self.why_not:
                return None
            state.restore(trainer.model)
            loss, gradients = self._gradient_of_ranks(trainer, batch, samples)
            found.append(self._on_rank_0(partial(self._error, number, loss, gradients, whole, dtype)))
            if self.why_not:
                return None
        return found if self._seat.rank == 0 else None

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Return what work comes to on rank 0, and None elsewhere; where it cannot be done, all ranks learn why."""
        found = None
        if self._seat.rank == 0:
            try:
                with undisturbed_random():
                    found = work()
            except Unrepeatable as error:
                self.why_not = str(error)
        self.why_not = str(from_rank_0(self.why_not))
        return found

    def _same_samples(self, dataset: Any, batch: Sequence[int]) -> Mapping[int, Any] | None:
        """Return the samples of a batch as rank 0 reads them, on all ranks, where each reading comes to others."""
        if not from_rank_0(self._seat.rank == 0 and self._reference().draws_samples):
            return None
        read = self._on_rank_0(lambda: _sendable(dict(zip(batch, fetch(dataset, batch), strict=True))))
        return dict(from_rank_0(read) or {})

    def _gradient_of_ranks(
        self, trainer: Trainer, batch: Sequence[int], samples: Mapping[int, Any] | None
    ) -> tuple[float, Gradients]:
        mine = trainer.pieces(batch)
        if samples is None:
            loaded = load(trainer.dataset, mine, trainer.recipe, 0, 0)
        else:
            loaded = (collate_of(trainer.recipe)([samples[number] for number in piece]) for piece in mine)
        trainer.model.train()
        trainer.optimizer.zero_grad(set_to_none=True)
        local = has_local_statistics(trainer.model)
        with ConstantDraws(), with_fixed_statistics(trainer.model) if local else nullcontext():
            total, count = trainer.accumulate(batch, [(len(piece), next(loaded)) for piece in mine])
        trainer.reduced(count)
        sums = from_all([total, count])
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
        return ratio(sum(s[0] for s in sums), sum(s[1] for s in sums)), gradients

    def _whole(
        self, state: TrainingState, batch: Sequence[int], samples: Mapping[int, Any] | None, dtype: torch.dtype | None
    ) -> Whole:
        ranks, reference = self._seat.world_size, self._reference()
        shards = [pieces(shard(batch, rank, ranks), self._plan.grad_accumulation) for rank in range(ranks)]
        reference.given = samples
        if samples is not None and not reference.joins_alike(batch):
            raise Unrepeatable("collate() draws random numbers")
        exact = reference.whole_batch(state, shards, torch.float64)
        if dtype is not None and reference.narrowed is not None:
            kind = str(reference.narrowed).removeprefix("torch.")
            raise Unrepeatable(f"loss() or the model narrows float64 to {kind} of its own accord")
        single = exact if dtype is not None else reference.whole_batch(state, shards, None)
        narrowed = reference.narrowed
        _require_meaning(exact)
        _require_meaning(single)
        return Whole(exact, single, narrowed, lambda: reference.losses_in_other_orders(state, shards, dtype))

    def _error(self, number: int, loss: float, gradients: Gradients, whole: Whole, dtype: torch.dtype | None) -> Mathematics:
        (exact_loss, exact), (single_loss, single) = whole.exact, whole.single
        if self._reference().has_local_statistics and not math.isfinite(loss):
            raise Unrepeatable("the loss is not finite where BatchNorm takes its running statistics for the batch's")
        u = torch.finfo(dtype).eps / 2 if dtype is not None else round_off(self._plan.precision, gradients)
        if whole.narrowed is not None:
            u = max(u, torch.finfo(whole.narrowed).eps / 2)
        if dtype is not None:
            ratios = {name: by_floor(gradients.get(name), exact[name], exact, 1e-11) for name in exact}
        else:
            ratios = excess_ratios(gradients, single, exact, u)
        scale = max(abs(exact_loss) * u, 1e-300)
        if abs(loss - exact_loss) > scale * (MOST_LOSS_ERROR if dtype is None else MOST_IN_FLOAT64 / u):
            # Of a loss that nearly cancels, or of large numbers of which it is the difference, rounding takes more.
            scale = max(scale, *(abs(other - exact_loss) for other in (single_loss, *whole.in_other_orders())))
        error = abs(loss - exact_loss) / scale
        return Mathematics(step=number, ratios=ratios, loss_error=error)


def _require_meaning(found: tuple[float, Gradients]) -> None:
    """See to it that a loss and its gradient can be compared, where nothing is drawn at random and statistics are fixed.

    Raises:
        Unrepeatable: They are not finite, or there is no gradient: what is drawn by chance may be all that there is.
    """
    loss, gradients = found
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients.values() if g is not None]
    if not math.isfinite(loss) or not all(bool(value.isfinite().all()) for value in values):
        raise Unrepeatable("the loss or its gradient is not finite where draws are constant and statistics fixed")
    if not any(bool(value.any()) for value in values):
        raise Unrepeatable("no gradient is left where draws are constant and statistics fixed")


def _sendable(samples: dict[int, Any]) -> dict[int, Any]:
    """Return samples that can be sent to other ranks.

    Raises:
        Unrepeatable: They cannot.
    """
    try:
        pickle.dumps(samples)
    except Exception as error:
        said = f"the data set draws random numbers, and its samples cannot be sent to other ranks ({type(error).__name__})"
        raise Unrepeatable(said) from error
    return samples

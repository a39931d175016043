"""The whole batch: the ranks' loss and gradient of it against those of one process (R7, R8)."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from harness.compare.correctness.bounds import MOST_IN_FLOAT64, MOST_LOSS_ERROR
from harness.compare.correctness.evidence import Mathematics
from harness.run.record import ratio
from harness.training.loader import collate_of, fetch, load
from harness.training.parallel.batchnorm import has_local_statistics, with_fixed_statistics
from harness.training.parallel.collectives import from_all, from_rank_0
from harness.training.partition import last_batch
from harness.training.shard import pieces, shard
from harness.training.state import undisturbed_random, widened
from harness.training.trainer import Trainer
from harness.verify.constant_draws import ConstantDraws
from harness.verify.pending_reference import PendingReference
from harness.verify.reference.data import Unrepeatable
from harness.verify.reference.whole import GlobalBatch, WholeGradient
from harness.verify.rounding import Gradients, by_floor, excess_ratios, round_off
from harness.verify.step_evidence import TakenStep
from harness.verify.subject import Subject

T = TypeVar("T")


@dataclass(frozen=True)
class WholeBatches:
    """The comparison of whole batches, on rank 0.

    Attributes:
        own_precision: In the run's own precision; None where it was not run.
        float64: The same in float64.
        why_not: Why one of them was not run, though it was due; empty where they were. The same on all ranks.
    """

    own_precision: list[Mathematics] | None
    float64: list[Mathematics] | None
    why_not: str


def compare_whole_batches(subject: Subject, reference: PendingReference, taken: Sequence[TakenStep]) -> WholeBatches:
    """Return how the ranks' loss and gradient of whole batches compare with those of one process; collective."""
    plan, own, wide = subject.plan, None, None
    whole = WholeBatch(subject, reference, taken)
    hook = plan.ddp.comm_hook
    if hook != "none":
        return WholeBatches(None, None, f"gradients travel compressed (ddp.comm_hook={hook})")
    is_wide = plan.precision == "float64"
    # Where a step is that coarse, its own precision hides too much.
    is_quick = plan.compare == "quick" and plan.precision != "bfloat16"
    try:
        whole.require_comparable()
        if not is_wide:
            own = whole.compare(None)
        # A run in float64 has one comparison, which is both.
        if is_wide or not is_quick:
            wide = whole.compare(torch.float64)
    except Unrepeatable as error:
        return WholeBatches(own, wide, str(error))
    return WholeBatches(own, wide, "")


@dataclass(frozen=True)
class Whole:
    """Loss and gradient of a global batch in one process.

    Attributes:
        exact: In float64.
        single: In the precision of the comparison.
        in_other_orders: Returns the loss with the samples in other orders.
    """

    exact: WholeGradient
    single: WholeGradient
    in_other_orders: Callable[[], list[float]]


class WholeBatch:
    """The comparison, as each rank goes through it; all ranks call the same methods in the same order.

    Nothing is drawn at random meanwhile, and BatchNorm of each rank's own batch takes its running statistics.

    Args:
        subject: What the ranks train.
        reference: Which does it alone, on rank 0.
        taken: The steps that were captured.
    """

    def __init__(self, subject: Subject, reference: PendingReference, taken: Sequence[TakenStep]) -> None:
        self._subject = subject
        self._reference = reference
        self._taken = taken

    def require_comparable(self) -> None:
        """See to it that one process can do what the ranks do together.

        Raises:
            Unrepeatable: It cannot, on all ranks alike, as by each method that does something on rank 0.
        """

        def require() -> None:
            why_not = self._reference.get().whole.why_not
            if why_not:
                raise Unrepeatable(why_not)

        self._on_rank_0(require)

    def compare(self, dtype: torch.dtype | None) -> list[Mathematics] | None:
        """Compare at the first two states, and with a last batch of unequal shards; return what came of it, on rank 0.

        Args:
            dtype: float64, or None for the run's own precision.

        Raises:
            Unrepeatable: One process cannot do it, or it would mean nothing; on all ranks alike.
        """
        plan = self._subject.plan
        # A new trainer: that of the steps is watched still, and has the precision of the run.
        trainer = self._subject.make_trainer(plan if dtype is None else dataclasses.replace(plan, precision="float64"))
        if dtype is not None:
            trainer.loss_module.recipe = widened(trainer.recipe)
        # At the first state, whatever step the last batch belongs to: any state will do.
        last = [dataclasses.replace(taken, batch=batch) for taken in self._taken[:1] for batch in last_batch(trainer)]
        compared = [self._compared(trainer, taken, dtype) for taken in [*self._taken[:2], *last]]
        return [comparison for comparison in compared if comparison is not None] if self._subject.is_rank_0 else None

    def _compared(self, trainer: Trainer, taken: TakenStep, dtype: torch.dtype | None) -> Mathematics | None:
        samples = self._same_samples(trainer.dataset, taken.batch)
        # One process first: what it cannot do, no rank is to begin.
        whole = self._on_rank_0(lambda: self._whole(taken, samples, dtype))
        taken.state.restore(trainer.model)
        loss, gradients = self._gradient_of_ranks(trainer, taken.batch, samples)
        return self._on_rank_0(lambda: self._error(taken.number, loss, gradients, whole, dtype) if whole else None)

    def _on_rank_0(self, work: Callable[[], T]) -> T | None:
        """Return what work comes to on rank 0, and None elsewhere.

        Raises:
            Unrepeatable: It cannot be done; on all ranks, which learn why from rank 0.
        """
        result, why_not = None, ""
        if self._subject.is_rank_0:
            try:
                with undisturbed_random():
                    result = work()
            except Unrepeatable as error:
                why_not = str(error)
        # Collective whether or not there was an error: otherwise the other ranks would wait for one that has left.
        why_not = str(from_rank_0(why_not))
        if why_not:
            raise Unrepeatable(why_not)
        return result

    def _same_samples(self, dataset: Any, batch: Sequence[int]) -> Mapping[int, Any] | None:
        """Return the samples of a batch as rank 0 reads them, on all ranks, where each reading comes to others."""
        if not from_rank_0(self._subject.is_rank_0 and self._reference.get().samples.are_drawn):
            return None
        samples = self._on_rank_0(lambda: _sendable(dict(zip(batch, fetch(dataset, batch), strict=True))))
        return dict(from_rank_0(samples) or {})

    def _gradient_of_ranks(
        self, trainer: Trainer, batch: Sequence[int], samples: Mapping[int, Any] | None
    ) -> tuple[float, Gradients]:
        own = trainer.batches.pieces(batch)
        if samples is None:
            loaded = load(trainer.dataset, own, trainer.recipe, 0, 0)
        else:
            loaded = (collate_of(trainer.recipe)([samples[number] for number in piece]) for piece in own)
        trainer.model.train()
        trainer.optimizer.zero_grad(set_to_none=True)
        local = has_local_statistics(trainer.model)
        with ConstantDraws(), with_fixed_statistics(trainer.model) if local else nullcontext():
            total, count = trainer.accumulate(batch, [(len(piece), next(loaded)) for piece in own])
        # For its scaling by the number of items, where losses are sums.
        trainer.reduced(count)
        sums = from_all([total, count])
        gradients = trainer.strategy.full_gradients()
        return ratio(sum(s[0] for s in sums), sum(s[1] for s in sums)), gradients

    def _whole(self, taken: TakenStep, samples: Mapping[int, Any] | None, dtype: torch.dtype | None) -> Whole:
        ranks, reference = self._subject.seat.world_size, self._reference.get()
        cuts = self._subject.plan.grad_accumulation
        batch = GlobalBatch(taken.state, [pieces(shard(taken.batch, rank, ranks), cuts) for rank in range(ranks)], samples)
        # Samples that were drawn are sent to all ranks, but each rank joins its own.
        if samples is not None and not reference.samples.joins_alike(taken.batch, samples):
            raise Unrepeatable("collate() draws random numbers")
        exact = reference.whole.gradient(batch, torch.float64)
        if dtype is not None and exact.narrowed is not None:
            kind = str(exact.narrowed).removeprefix("torch.")
            raise Unrepeatable(f"loss() or the model narrows float64 to {kind} of its own accord")
        single = exact if dtype is not None else reference.whole.gradient(batch, None)
        # Both: what is finite in float64 may overflow in the run's own precision.
        _require_meaning(exact)
        _require_meaning(single)
        return Whole(exact, single, lambda: reference.whole.losses_in_other_orders(batch, dtype))

    def _error(self, number: int, loss: float, gradients: Gradients, whole: Whole, dtype: torch.dtype | None) -> Mathematics:
        exact, single = whole.exact, whole.single
        if self._reference.get().batch_norms.has_local_statistics and not math.isfinite(loss):
            raise Unrepeatable("the loss is not finite where BatchNorm takes its running statistics for the batch's")
        u = torch.finfo(dtype).eps / 2 if dtype is not None else round_off(self._subject.plan.precision, gradients)
        if single.narrowed is not None:
            u = max(u, torch.finfo(single.narrowed).eps / 2)
        if dtype is not None:
            wanted = exact.gradients
            ratios = {name: by_floor(gradients.get(name), wanted[name], wanted, 1e-11) for name in wanted}
        else:
            ratios = excess_ratios(gradients, single.gradients, exact.gradients, u)
        scale = max(abs(exact.loss) * u, 1e-300)
        error = abs(loss - exact.loss)
        if error > scale * (MOST_LOSS_ERROR if dtype is None else MOST_IN_FLOAT64 / u):
            # Of a loss that nearly cancels, or of large numbers of which it is the difference, rounding takes more.
            scale = max(scale, *(abs(other - exact.loss) for other in (single.loss, *whole.in_other_orders())))
        return Mathematics(step=number, ratios=ratios, loss_error=error / scale)


def _require_meaning(whole: WholeGradient) -> None:
    """See to it that a loss and its gradient can be compared, where nothing is drawn at random and statistics are fixed.

    Raises:
        Unrepeatable: They are not finite, or there is no gradient: what is drawn by chance may be all that there is.
    """
    values = [g.coalesce().values() if g.is_sparse else g for g in whole.gradients.values() if g is not None]
    if not math.isfinite(whole.loss) or not all(bool(value.isfinite().all()) for value in values):
        raise Unrepeatable("the loss or its gradient is not finite where draws are constant and statistics fixed")
    if not any(bool(value.any()) for value in values):
        raise Unrepeatable("no gradient is left where draws are constant and statistics fixed")


def _sendable(samples: dict[int, Any]) -> dict[int, Any]:
    """Return samples that can be sent to other ranks.

    Raises:
        Unrepeatable: They cannot.
    """
    try:
        # Before the collective, in which a sample that cannot be pickled would leave the other ranks waiting.
        pickle.dumps(samples)
    except Exception as error:
        kind = type(error).__name__
        raise Unrepeatable(
            f"the data set draws random numbers, and its samples cannot be sent to other ranks ({kind})"
        ) from error
    return samples

"""One rank's step: what is computed here, what is added up over ranks, and what follows from it."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.run.plan import TrainPlan
from harness.run.record import joined
from harness.training.batch import moved
from harness.training.batches import Batches
from harness.training.digest import kind_digests
from harness.training.loss import LossModule, NonFinite, StepResult
from harness.training.model import build_model, build_optimizer
from harness.training.parallel.batchnorm import SyncBatchNorm
from harness.training.parallel.ddp_strategy import DdpStrategy
from harness.training.parallel.gradients import are_finite, gradient_values, scale_
from harness.training.parallel.strategy import Strategy
from harness.training.recipe import Recipe, make_scheduler
from harness.training.seat import Seat
from harness.training.seeds import derive, seed_everything, seed_rank
from harness.training.state import DTYPES


class Trainer:
    """Trains one recipe on this rank. The steps of all ranks together are those of one process.

    Args:
        plan: What to train.
        recipe: Made anew for this trainer.
        dataset: Its training samples.
        seat: Who this process is.

    Raises:
        ConfigError: The data set is empty, or a batch leaves a rank without samples where that cannot work.
        Mismatch: The recipe makes another model on some ranks.
    """

    def __init__(self, plan: TrainPlan, recipe: Recipe, dataset: Any, seat: Seat) -> None:
        self.plan = plan
        self.recipe = recipe
        self.dataset = dataset
        self.seat = seat
        self.dtype = DTYPES[plan.precision]
        self.strategy: Strategy = DdpStrategy(plan, seat)
        self.batches = Batches(plan, recipe, dataset, self.strategy.data_rank())
        # Just before the model, so that its weights do not depend on what the data set has drawn.
        seed_everything(derive(plan.seed, "model"))
        self.model = build_model(recipe, plan, seat.device)
        self.optimizer = build_optimizer(recipe, self.model)
        self.num_steps = self.batches.num_steps(plan.epochs or 0) if plan.steps is None else plan.steps
        # A schedule of no steps may divide by their number.
        self.scheduler = make_scheduler(recipe, self.optimizer, self.num_steps) if self.num_steps else None
        # After optimizer(), which may have frozen some.
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.loss_module = LossModule(recipe, self.model, plan, seat.device)
        self.counts_items: bool | None = None
        self.num_items: float | None = None
        self.strategy.wrap(self.loss_module)
        # Last: all before is drawn alike on all ranks, and from here on each draws its own.
        seed_rank(plan.seed, seat.rank)

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def digests(self) -> dict[str, str]:
        """Return the digests of parameters, buffers and optimizer state as they are now."""
        return kind_digests(self.model, self.optimizer)

    def facts(self) -> dict[str, Any]:
        """Return what this rank sees of itself; all ranks must agree, but for their number and their device's."""
        grouped = dist.is_initialized()
        return {
            "world_size": dist.get_world_size() if grouped else 1,
            "group_rank": dist.get_rank() if grouped else 0,
            "backend": dist.get_backend() if grouped else "",
            "device": str(self.seat.device),
            "dtype": str(self.dtype),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "num_trainable": len(self.parameters),
            "num_samples": self.batches.num_samples,
            "num_steps": self.num_steps,
            "config": joined({name: repr(value) for name, value in dataclasses.asdict(self.plan).items()}),
            "host": platform.node(),
        }

    def steps(self, first: int = 0) -> Iterator[tuple[Sequence[int], list[Any]]]:
        """Yield, for each step from ``first`` on, the global batch's sample numbers and this rank's batches of it."""
        synchronises = any(isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) for layer in self.model.modules())
        return self.batches.steps(first, self.num_steps, synchronises)

    # --- one step ----------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[int], loaded: list[tuple[int, Any]]) -> StepResult:
        """Do one optimizer step with this rank's part of a global batch.

        Raises:
            NonFinite: A loss is not finite on any rank, and the plan is to stop.
        """
        self.model.train()
        # None and not zeros: an optimizer passes over a parameter without a gradient, but decays one whose gradient is 0.
        self.optimizer.zero_grad(set_to_none=True)
        # Forward moves running statistics before anybody knows that the loss is not finite.
        buffers = [buffer.clone() for buffer in self.model.buffers()] if self.plan.on_nonfinite == "skip" else []
        loss_sum, count = self.accumulate(batch, loaded)
        values = self.reduced(count)
        # What is reduced has the same bits on all ranks: they decide alike without asking each other.
        if not are_finite([self._alarm(), *values]):
            return self._left_out(loss_sum, count, buffers)
        if self.plan.clip_norm is not None:
            self.strategy.clip(values, self.plan.clip_norm)
        self.update()
        return StepResult(loss_sum, count)

    def accumulate(self, batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        """Run forward and backward over this rank's pieces, the last of which reduces; return sum and number of losses."""
        # The optimizer does not know it, and so does not clear it.
        self.loss_module.alarm.grad = None
        # A rank without samples takes part in the reduction too, or the others would wait for it for ever.
        parts = loaded or [(0, None)]
        losses: list[tuple[Tensor, int]] = []
        counts: list[float | Tensor] = []
        for number, (size, piece) in enumerate(parts):
            last = number == len(parts) - 1
            with self.strategy.accumulate(last):
                on_device = moved(piece, self.seat.device, self.dtype)
                loss, items = self.strategy.forward(on_device)
                self._agree_on_kind(items is not None, has_samples=size > 0)
                self.backward(loss, items, size, len(batch))
            losses.append((loss.detach(), 1 if items is not None else size))
            counts.append(size if items is None else items.detach())
        # float() waits for the device: only when all pieces have been sent there.
        return sum(float(loss) * number for loss, number in losses), sum(float(count) for count in counts)

    def backward(self, loss: Tensor, items: Tensor | None, size: int, global_size: int) -> None:
        """Backpropagate a piece's loss, weighted so that the mean over ranks is the global batch's gradient.

        The mean loss of a piece of ``size`` samples counts ``size / global_size`` in the global mean, and the reduction divides
        by the number of ranks. A sum over items is weighted later, when the number of all ranks' items is known. A loss that
        is not finite makes the alarm's gradient so: the reduction then tells all ranks.
        """
        weight = 1.0 if items is not None else size * self.strategy.data_rank()[1] / global_size
        value = loss.detach()
        # The difference is 0, or NaN where the loss is not finite.
        loss.backward((value - value) + weight)

    def reduced(self, count: float) -> list[Tensor]:
        """Return the values of the global batch's gradients, to be changed in place."""
        values = gradient_values(self.parameters)
        if self.counts_items:
            total = torch.tensor(count, dtype=torch.float64, device=self.seat.device)
            if self.seat.world_size > 1:
                dist.all_reduce(total)
            self.num_items = float(total)
            # No item on any rank has no mean: NaN makes the step one to refuse.
            scale_(values, self.seat.world_size / self.num_items if self.num_items else math.nan)
        return values

    def _alarm(self) -> Tensor:
        gradient = self.loss_module.alarm.grad
        assert gradient is not None
        return gradient

    def update(self) -> None:
        """Take the optimizer's step and the scheduler's."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    # --- evaluation --------------------------------------------------------------------------------------------------

    def over_ranks(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Return the (sum, count) of each metric over all ranks, from this rank's own."""
        if self.seat.world_size == 1:
            return dict(totals)
        # A rank without samples does not know the names, and one rank's batches may have names that another's do not.
        names_of_ranks: list[Any] = [None] * self.seat.world_size
        dist.all_gather_object(names_of_ranks, list(totals))
        names = list(dict.fromkeys(name for names in names_of_ranks for name in names))
        sums = torch.tensor([totals.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64, device=self.seat.device)
        if names:
            dist.all_reduce(sums)
        return {name: (float(total), float(count)) for name, (total, count) in zip(names, sums.tolist(), strict=True)}

    # --- small parts of a step ---------------------------------------------------------------------------------------

    def _agree_on_kind(self, counts_items: bool, has_samples: bool) -> None:
        """Learn from rank 0, which always has samples, whether losses come as (sum, count): a rank without any cannot tell."""
        if self.counts_items is None:
            kind = torch.tensor(int(counts_items), device=self.seat.device)
            if self.seat.world_size > 1:
                dist.broadcast(kind, 0)
            self.counts_items = bool(kind)
        if has_samples and self.counts_items != counts_items:
            raise ConfigError(f"{type(self.recipe).__name__}.loss() returns a mean for some batches, (sum, count) for others.")

    def _left_out(self, loss_sum: float, count: float, buffers: list[Tensor]) -> StepResult:
        if self.plan.on_nonfinite == "skip":
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            return StepResult(loss_sum, count, skipped=True)
        own = not math.isfinite(loss_sum)
        if own:
            cause = f"the loss is {loss_sum / count if count else loss_sum}"
        elif not are_finite([self._alarm()]):
            cause = "the loss of another rank is not finite"
        elif self.num_items == 0:
            cause = "loss() counted no item on any rank"
        else:
            cause = "the gradients are not finite, though every loss is"
        is_consequence = not own and not are_finite([self._alarm()])
        raise NonFinite(f"{cause}; on_nonfinite=skip would leave such steps out.", is_consequence)

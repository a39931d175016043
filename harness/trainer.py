"""One rank's model, optimizer and step: what is computed here, what is added up over ranks, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from harness.digest import kind_digests
from harness.errors import ConfigError, HarnessError
from harness.gradients import are_finite, clip_, gradient_values, scale_
from harness.loader import epoch_batches, load, to_device
from harness.parallel import DataParallel, convert_sync_batchnorm
from harness.plan import TrainPlan
from harness.recipe import Recipe, make_scheduler
from harness.seeds import derive, seed_everything, seed_rank
from harness.shard import pieces, shard

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Of parameters; ``bfloat16`` keeps them in float32 and computes under autocast."""


class NonFinite(HarnessError):
    """A loss that is NaN or infinite, on this rank or, as a consequence, on another."""

    def __init__(self, message: str, is_consequence: bool) -> None:
        super().__init__(message)
        self.is_consequence = is_consequence


@dataclass(frozen=True)
class Seat:
    """Where this process sits among those that train together."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class StepResult:
    """What one step came to on this rank: sum and number of its losses, and whether all ranks left the step out."""

    loss_sum: float
    count: float
    skipped: bool = False


class LossModule(nn.Module):
    """The recipe's loss as a module, so that DDP sees all of forward and the recipe its own bare model.

    Called with None, by a rank that has no sample in this step, it takes part with gradients of zero.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._recipe = recipe
        self._autocast = precision == "bfloat16"
        self._device_type = device.type

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return (mean, None) or (sum, number of items), as the recipe does; shapes []."""
        if batch is None:
            return self._zero(), None
        with torch.autocast(self._device_type, torch.bfloat16) if self._autocast else nullcontext():
            loss = self._recipe.loss(self.model, batch)
        if isinstance(loss, tuple):
            return loss[0], loss[1]
        return loss, None

    def _zero(self) -> Tensor:
        sparse = {id(m.weight): m for m in self.model.modules() if isinstance(m, nn.Embedding) and m.sparse}
        dense = [p for p in self.model.parameters() if p.requires_grad and id(p) not in sparse]
        terms = [p.reshape(-1)[:0].sum() for p in dense]
        terms += [F.embedding(m.weight.new_empty(0, dtype=torch.long), m.weight, sparse=True).sum() for m in sparse.values()]
        return torch.stack(terms).sum()


class Trainer:
    """Trains one recipe on this rank. The steps of all ranks together are those of one process.

    Args:
        plan: What to train.
        recipe: Made anew for this trainer.
        dataset: Its training samples.
        seat: Who this process is.

    Raises:
        ConfigError: The data set is empty, or a batch leaves a rank without samples where that cannot work.
    """

    def __init__(self, plan: TrainPlan, recipe: Recipe, dataset: Any, seat: Seat) -> None:
        self.plan = plan
        self.recipe = recipe
        self.dataset = dataset
        self.seat = seat
        self.dtype = DTYPES[plan.precision]
        self.num_samples = num_samples(dataset)
        seed_everything(derive(plan.seed, "model"))
        self.model = self._build_model()
        self.optimizer = recipe.optimizer(self.model)
        self.num_steps = plan.steps or self._steps_of_epochs(plan.epochs or 0)
        self.scheduler = make_scheduler(recipe, self.optimizer, self.num_steps)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.loss_module = LossModule(recipe, self.model, plan.precision, seat.device)
        self.counts_items: bool | None = None
        self.wrapped = self._wrap()
        seed_rank(plan.seed, seat.rank)

    def _build_model(self) -> nn.Module:
        model = self.recipe.model().to(self.seat.device, self.dtype)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"{type(self.recipe).__name__}.model() has no parameter to train.")
        return convert_sync_batchnorm(model) if self.plan.sync_bn else model

    def _wrap(self) -> DataParallel:
        return DataParallel(self.loss_module, find_unused_parameters=self.plan.find_unused_parameters)

    def _steps_of_epochs(self, epochs: int) -> int:
        return sum(len(self.epoch_batches(epoch)) for epoch in range(epochs))

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
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
        }

    # --- which samples -----------------------------------------------------------------------------------------------

    def epoch_batches(self, epoch: int) -> list[Sequence[int]]:
        """Return the global batches of an epoch."""
        return epoch_batches(self.recipe, self.num_samples, self.plan.global_batch_size, self.plan.seed, epoch)

    def steps(self, first: int = 0) -> Iterator[tuple[Sequence[int], list[Any]]]:
        """Yield, for each step from ``first`` on, the global batch's sample numbers and this rank's batches of it."""
        begin = 0
        epoch = 0
        while begin < self.num_steps:
            batches = self.epoch_batches(epoch)
            wanted = batches[max(0, first - begin) : self.num_steps - begin]
            yield from self._load(wanted, epoch)
            begin += len(batches)
            epoch += 1

    def _load(self, batches: list[Sequence[int]], epoch: int) -> Iterator[tuple[Sequence[int], list[Any]]]:
        mine = [self.pieces(batch) for batch in batches]
        flat = [piece for step in mine for piece in step]
        seed = derive(self.plan.seed, "workers", self.seat.rank, epoch)
        loaded = load(self.dataset, flat, self.recipe, self.plan.num_workers, seed)
        for batch, step in zip(batches, mine, strict=True):
            yield batch, [(len(piece), next(loaded)) for piece in step]

    def pieces(self, batch: Sequence[int]) -> list[Sequence[int]]:
        """Return this rank's part of a global batch, cut for gradient accumulation.

        Raises:
            ConfigError: The part is empty, and synchronised BatchNorm needs every rank.
        """
        mine = self.shard(batch)
        if not mine and self.plan.sync_bn and self.seat.world_size > 1:
            raise ConfigError(
                f"sync_bn=true needs a sample on every rank in every step, and a batch of {len(batch)} has none for rank "
                f"{self.seat.rank} of {self.seat.world_size}. Change global_batch_size or nprocs."
            )
        return pieces(mine, self.plan.grad_accumulation)

    def shard(self, batch: Sequence[int]) -> Sequence[int]:
        """Return this rank's part of a global batch."""
        return shard(batch, self.seat.rank, self.seat.world_size)

    # --- one step ----------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[int], loaded: list[tuple[int, Any]]) -> StepResult:
        """Do one optimizer step with this rank's part of a global batch.

        Raises:
            NonFinite: A loss is not finite on any rank, and the plan is to stop.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, count = self.accumulate(batch, loaded)
        values = self.reduced(count)
        if not are_finite(values):
            return self._left_out(loss_sum, count)
        if self.plan.clip_norm is not None:
            clip_(values, self.plan.clip_norm)
        self.update()
        return StepResult(loss_sum, count)

    def accumulate(self, batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        """Run forward and backward over this rank's pieces, the last of which reduces; return sum and number of losses."""
        parts = loaded or [(0, None)]
        losses: list[Tensor] = []
        counts: list[float | Tensor] = []
        for number, (size, piece) in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else self.wrapped.no_sync():
                on_device = to_device(piece, self.seat.device, self.dtype)
                loss, items = self.wrapped(on_device)
                self._agree_on_kind(items is not None, has_samples=size > 0)
                self.backward(loss, items, size, len(batch))
            losses.append(loss.detach().double() * (1 if items is not None else size))
            counts.append(size if items is None else items.detach())
        return sum(float(loss) for loss in losses), sum(float(count) for count in counts)

    def backward(self, loss: Tensor, items: Tensor | None, size: int, global_size: int) -> None:
        """Backpropagate a piece's loss, weighted so that the mean over ranks is the global batch's gradient.

        The mean loss of a piece of ``size`` samples counts ``size / global_size`` in the global mean, and DDP divides by the
        number of ranks. A sum over items is weighted later, when the number of all ranks' items is known. A loss that is not
        finite makes every gradient so: the reduction then tells all ranks.
        """
        weight = 1.0 if items is not None else size * self.seat.world_size / global_size
        exact = torch.full_like(loss, weight, requires_grad=False)
        (loss * torch.where(torch.isfinite(loss.detach()), exact, math.nan)).backward()

    def reduced(self, count: float) -> list[Tensor]:
        """Return the values of the global batch's gradients, to be changed in place."""
        values = gradient_values(self.parameters)
        if self.counts_items:
            total = torch.tensor(count, dtype=torch.float64, device=self.seat.device)
            if self.seat.world_size > 1:
                dist.all_reduce(total)
            scale_(values, self.seat.world_size / float(total) if total else math.nan)
        return values

    def update(self) -> None:
        """Take the optimizer's step and the scheduler's."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _agree_on_kind(self, counts_items: bool, has_samples: bool) -> None:
        """Learn from rank 0, which always has samples, whether losses come as (sum, count): a rank without any cannot tell."""
        if self.counts_items is None:
            kind = torch.tensor(int(counts_items), device=self.seat.device)
            if self.seat.world_size > 1:
                dist.broadcast(kind, 0)
            self.counts_items = bool(kind)
        if has_samples and self.counts_items != counts_items:
            raise ConfigError(f"{type(self.recipe).__name__}.loss() returns a mean for some batches, (sum, count) for others.")

    def _left_out(self, loss_sum: float, count: float) -> StepResult:
        if self.plan.on_nonfinite == "skip":
            return StepResult(loss_sum, count, skipped=True)
        own = not math.isfinite(loss_sum)
        cause = f"the loss is {loss_sum / count if count else loss_sum}" if own else "the reduced gradients are not finite"
        raise NonFinite(f"{cause}; on_nonfinite=skip would leave such steps out.", is_consequence=not own)


def num_samples(dataset: Any) -> int:
    """Return the length of a map-style data set.

    Raises:
        ConfigError: It has none, or no sample.
    """
    try:
        count = len(dataset)
    except TypeError:
        raise ConfigError(f"{type(dataset).__name__} has no length: recipes give map-style data sets.") from None
    if count == 0:
        raise ConfigError("dataset() of the recipe has no sample.")
    return count

"""One rank's model, optimizer and step: what is computed here, what is added up over ranks, and what follows from it."""

from __future__ import annotations

import dataclasses
import inspect
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from harness.errors import ConfigError, HarnessError
from harness.run.plan import TrainPlan
from harness.run.record import joined
from harness.training.batch import moved
from harness.training.compiling import compiled
from harness.training.digest import kind_digests
from harness.training.loader import epoch_batches, load
from harness.training.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from harness.training.parallel.collectives import require_one_model
from harness.training.parallel.comm_hooks import comm_hook
from harness.training.parallel.ddp import DataParallel, Reduction
from harness.training.parallel.gradients import are_finite, clip_, gradient_values, scale_
from harness.training.parallel.sparse import sparse_tables
from harness.training.recipe import Recipe, make_scheduler
from harness.training.seeds import derive, seed_everything, seed_rank
from harness.training.shard import pieces, shard
from harness.training.state import DTYPES, in_precision


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

    Attributes:
        recipe: Whose loss it is.
        alarm: A parameter of value 0 that is added to every loss, so that its gradient, averaged with all others, is NaN on
            all ranks when a loss was not finite on any: other gradients need not show it (behind a ReLU, say). Shape
            [1], because PowerSGD wants a dimension.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, plan: TrainPlan, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.alarm = nn.Parameter(torch.zeros(1, device=device, dtype=DTYPES[plan.precision]))
        self.recipe = recipe
        self._autocast = plan.precision == "bfloat16"
        self._uses_all = not plan.ddp.find_unused_parameters
        self._device_type = device.type

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return (mean, None) or (sum, number of items), as the recipe does; shapes []."""
        if batch is None:
            return self._zero(), None
        with torch.autocast(self._device_type, torch.bfloat16) if self._autocast else nullcontext():
            loss, items = loss_and_items(self.recipe.loss(self.model, batch), f"{type(self.recipe).__name__}.loss()")
        return loss + self.alarm.sum().to(loss.dtype), items

    def _zero(self) -> Tensor:
        """Return 0, which depends on what DDP waits for; not on sparse tables, which nobody waits for."""
        sparse = {id(table) for table in sparse_tables(self.model)}
        dense = [p for p in self.model.parameters() if p.requires_grad and id(p) not in sparse]
        return self.alarm.sum() + sum(p.reshape(-1)[:0].sum() for p in dense if self._uses_all)


def loss_and_items(returned: Any, source: str) -> tuple[Tensor, Tensor | None]:
    """Return (mean, None) or (sum, number of items) from what ``loss()`` of a recipe returned; shapes [].

    Raises:
        ConfigError: It is neither; ``source`` says whose it is.
    """
    wanted = "Return the mean over the batch as a tensor of one element, or (sum, number of items)."
    loss, items = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor):
        raise ConfigError(f"{source} returned {'None' if loss is None else f'a {type(loss).__name__}'}. {wanted}")
    if loss.numel() != 1:
        raise ConfigError(f"{source} returned a tensor of shape {tuple(loss.shape)}. {wanted}")
    if not loss.requires_grad:
        raise ConfigError(f"{source} returned a tensor that depends on no trainable parameter: was it detached?")
    if items is None:
        return loss.reshape(()), None
    if not isinstance(items, Tensor | Real) or (isinstance(items, Tensor) and items.numel() != 1):
        what = f"a tensor of shape {tuple(items.shape)}" if isinstance(items, Tensor) else f"a {type(items).__name__}"
        raise ConfigError(f"{source} returned (loss, {what}): the second is to be the number of items in the sum. {wanted}")
    exact = None if isinstance(items, Tensor) else torch.float64
    return loss.reshape(()), torch.as_tensor(items, dtype=exact, device=loss.device).reshape(())


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
        self.num_samples = num_samples(dataset)
        seed_everything(derive(plan.seed, "model"))
        self.model = self._build_model()
        self.optimizer = self._build_optimizer()
        self.num_steps = plan.steps or self._steps_of_epochs(plan.epochs or 0)
        self.scheduler = make_scheduler(recipe, self.optimizer, self.num_steps)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.loss_module = LossModule(recipe, self.model, plan, seat.device)
        self.counts_items: bool | None = None
        self.num_items: float | None = None
        self.wrapped = self._wrap()
        self._settle_buckets()
        seed_rank(plan.seed, seat.rank)

    def _build_model(self) -> nn.Module:
        model = self.recipe.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{type(self.recipe).__name__}.model() returned a {type(model).__name__}, not an nn.Module.")
        name = type(self.recipe).__name__
        if any(is_lazy(p) for p in model.parameters()):
            raise ConfigError(f"{name}.model() has lazy layers without a shape yet. Run a batch through the model there.")
        if any(p.is_complex() for p in model.parameters()):
            raise ConfigError(
                f"{name}.model() has complex parameters, which would lose a part. Hold them as pairs of real ones."
            )
        model = in_precision(model, self.seat.device, self.dtype)
        require_one_model(model, None)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"{name}.model() has no parameter to train.")
        if self.plan.sync_bn:
            model = convert_sync_batchnorm(model)
        return compiled(model) if self.plan.compile else model

    def _build_optimizer(self) -> Optimizer:
        optimizer = self.recipe.optimizer(self.model)
        returned = f"{type(self.recipe).__name__}.optimizer() returned a {type(optimizer).__name__}"
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"{returned}, not an optimizer of torch.")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(f"{returned}, whose step() takes a closure that evaluates the loss again. Use one that does not.")
        return optimizer

    def _wrap(self) -> DataParallel:
        ddp = self.plan.ddp
        return DataParallel(
            self.loss_module,
            comm_buffer_size=ddp.bucket_cap_mb,
            find_unused_parameters=ddp.find_unused_parameters,
            reduction=Reduction(ddp.gradient_as_bucket_view, ddp.static_graph, ddp.wrap_one_rank, comm_hook(ddp.comm_hook)),
        )

    def _settle_buckets(self) -> None:
        """Have DDP order its buckets now, by gradients of zeros.

        It does so after the first backward, and from 3 ranks on the order of additions follows from a gradient's place in its
        bucket: the first step of resumed training would else differ in bits from the same step of training that went on. With
        a static graph DDP learns from its first step which gradients there are, and how often: that has to be a true one,
        unless gradients are accumulated, which DDP cannot begin with.
        """
        learns = self.plan.ddp.static_graph and self.plan.grad_accumulation == 1
        if self.seat.world_size > 1 and not learns:
            self.wrapped(None)[0].backward()
            for parameter in self.loss_module.parameters():
                parameter.grad = None

    def _steps_of_epochs(self, epochs: int) -> int:
        if not hasattr(self.recipe, "batches"):
            return epochs * -(-self.num_samples // self.plan.global_batch_size)
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
            "config": joined({name: repr(value) for name, value in dataclasses.asdict(self.plan).items()}),
            "host": platform.node(),
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
        self._check_synchronised(batches)
        mine = [self.pieces(batch) for batch in batches]
        flat = [piece for step in mine for piece in step]
        seed = derive(self.plan.seed, "workers", self.seat.rank, epoch)
        loaded = load(self.dataset, flat, self.recipe, self.plan.num_workers, seed)
        for batch, step in zip(batches, mine, strict=True):
            yield batch, [(len(piece), next(loaded)) for piece in step]

    def pieces(self, batch: Sequence[int]) -> list[Sequence[int]]:
        """Return this rank's part of a global batch, cut for gradient accumulation."""
        return pieces(self.shard(batch), self.plan.grad_accumulation)

    def shard(self, batch: Sequence[int]) -> Sequence[int]:
        """Return this rank's part of a global batch."""
        return shard(batch, self.seat.rank, self.seat.world_size)

    def _check_synchronised(self, batches: list[Sequence[int]]) -> None:
        """Refuse, on all ranks alike, batches that synchronised BatchNorm would hang on.

        Raises:
            ConfigError: Some rank has fewer pieces of a batch than another.
        """
        ranks, cuts = self.seat.world_size, self.plan.grad_accumulation
        if ranks == 1 or not any(isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) for layer in self.model.modules()):
            return
        who = "sync_bn=true" if self.plan.sync_bn else "SyncBatchNorm"
        for size in sorted({len(batch) for batch in batches}):
            if min(size // ranks, cuts) < min(-(-size // ranks), cuts):
                raise ConfigError(
                    f"{who} needs samples on every rank in every step, and a batch of {size} is not enough for "
                    f"nprocs={ranks} times grad_accumulation={cuts}. Change global_batch_size, nprocs or steps."
                )

    # --- one step ----------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[int], loaded: list[tuple[int, Any]]) -> StepResult:
        """Do one optimizer step with this rank's part of a global batch.

        Raises:
            NonFinite: A loss is not finite on any rank, and the plan is to stop.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        buffers = [buffer.clone() for buffer in self.model.buffers()] if self.plan.on_nonfinite == "skip" else []
        loss_sum, count = self.accumulate(batch, loaded)
        values = self.reduced(count)
        if not are_finite([self._alarm(), *values]):
            return self._left_out(loss_sum, count, buffers)
        if self.plan.clip_norm is not None:
            clip_(values, self.plan.clip_norm)
        self.update()
        return StepResult(loss_sum, count)

    def accumulate(self, batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        """Run forward and backward over this rank's pieces, the last of which reduces; return sum and number of losses."""
        self.loss_module.alarm.grad = None
        parts = loaded or [(0, None)]
        losses: list[tuple[Tensor, int]] = []
        counts: list[float | Tensor] = []
        for number, (size, piece) in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else self.wrapped.no_sync():
                on_device = moved(piece, self.seat.device, self.dtype)
                loss, items = self._forward(on_device)
                self._agree_on_kind(items is not None, has_samples=size > 0)
                self.backward(loss, items, size, len(batch))
            losses.append((loss.detach(), 1 if items is not None else size))
            counts.append(size if items is None else items.detach())
        return sum(float(loss) * number for loss, number in losses), sum(float(count) for count in counts)

    def _forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        try:
            loss: tuple[Tensor, Tensor | None] = self.wrapped(batch)
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            raise ConfigError(
                f"{type(self.recipe).__name__} has a parameter that took no part in the last step's loss, so that nothing was "
                "averaged for it. Use it in every step, or set ddp.find_unused_parameters=true."
            ) from None
        return loss

    def backward(self, loss: Tensor, items: Tensor | None, size: int, global_size: int) -> None:
        """Backpropagate a piece's loss, weighted so that the mean over ranks is the global batch's gradient.

        The mean loss of a piece of ``size`` samples counts ``size / global_size`` in the global mean, and DDP divides by the
        number of ranks. A sum over items is weighted later, when the number of all ranks' items is known. A loss that is not
        finite makes the alarm's gradient so: the reduction then tells all ranks.
        """
        weight = 1.0 if items is not None else size * self.seat.world_size / global_size
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
        everybody: list[Any] = [None] * self.seat.world_size
        dist.all_gather_object(everybody, list(totals))
        names = list(dict.fromkeys(name for one in everybody for name in one))
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


def num_samples(dataset: Any, source: str = "dataset()") -> int:
    """Return the length of a map-style data set, which ``source`` of a recipe returned.

    Raises:
        ConfigError: It has none, or no sample.
    """
    kind = type(dataset).__name__
    if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
        raise ConfigError(f"{source} of the recipe returned a {kind}. Return a map-style data set, which has a length.")
    count = len(dataset)
    if count == 0:
        raise ConfigError(f"{source} of the recipe returned a {kind} without a sample.")
    return count

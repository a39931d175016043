"""The strategy ``ddp``: every rank holds the whole model, and gradients are averaged in backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from harness.errors import ConfigError
from harness.run.plan import TrainPlan
from harness.training.loss import LossModule
from harness.training.parallel.comm_hooks import Hook, comm_hook
from harness.training.parallel.ddp import DataParallel, Reduction
from harness.training.parallel.ddp_timing import reducing, reduction, watch
from harness.training.parallel.gradients import clip_
from harness.training.parallel.sparse import Rows
from harness.training.parallel.strategy import StepTimes
from harness.training.seat import Seat


class DdpStrategy:
    """Trains by :class:`DataParallel`.

    Args:
        plan: With the settings of DDP.
        seat: Who this process is.
    """

    _loss: LossModule
    _wrapped: DataParallel

    def __init__(self, plan: TrainPlan, seat: Seat) -> None:
        self._plan = plan.ddp
        self._accumulates = plan.grad_accumulation > 1
        self._seat = seat

    def data_rank(self) -> tuple[int, int]:
        """Return this rank and their number: every rank has a part of its own."""
        return self._seat.rank, self._seat.world_size

    def wrap(self, loss: LossModule) -> None:
        """Build what averages the gradients; rank 0's parameters are everybody's from now on."""
        plan, self._loss = self._plan, loss
        how = Reduction(plan.gradient_as_bucket_view, plan.static_graph, plan.wrap_one_rank, comm_hook(plan.comm_hook))
        self._wrapped = DataParallel(
            loss,
            comm_buffer_size=plan.bucket_cap_mb,
            find_unused_parameters=plan.find_unused_parameters,
            reduction=how,
        )
        self._settle_buckets()

    def _settle_buckets(self) -> None:
        """Have DDP order its buckets now, by gradients of zeros.

        It does so after the first backward, and from 3 ranks on the order of additions follows from a gradient's place in its
        bucket: the first step of resumed training would else differ in bits from the same step of training that went on. With
        a static graph DDP learns from its first step which gradients there are, and how often: that has to be a true one,
        unless gradients are accumulated, which DDP cannot begin with.
        """
        learns = self._plan.static_graph and not self._accumulates
        if self._seat.world_size > 1 and not learns:
            # The way of a rank without samples: it needs no data and draws no random numbers.
            self._wrapped(None)[0].backward()
            for parameter in self._loss.parameters():
                # As they were: zeros are gradients too, by which an optimizer would decay its parameters.
                parameter.grad = None

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return what the module returns.

        Raises:
            ConfigError: A parameter took no part in the step before, and DDP waited for its gradient.
        """
        try:
            loss: tuple[Tensor, Tensor | None] = self._wrapped(batch)
        except RuntimeError as error:
            # DDP has no exception of its own for it, only this sentence.
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            recipe = type(self._loss.recipe).__name__
            raise ConfigError(
                f"{recipe} has a parameter that took no part in the last step's loss, so that nothing was averaged for it. Use "
                "it in every step, or set ddp.find_unused_parameters=true."
            ) from None
        return loss

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Have gradients stay on this rank meanwhile, unless the piece is the last."""
        return nullcontext() if last else self._wrapped.no_sync()

    def clip(self, values: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm``: they are whole on every rank."""
        return clip_(values, max_norm)

    def full_state(self) -> Mapping[str, Any]:
        """Return the bare model's state."""
        # Not the wrapper's, in which the loss's alarm is too.
        return self._loss.model.state_dict()

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients as they lie in the parameters."""
        return {name: parameter.grad for name, parameter in self._trained()}

    def unreduced(self) -> list[str]:
        """Return the names of trained parameters that came after DDP was built, or were never in it."""
        return [name for name, parameter in self._trained() if not self._wrapped.is_covered(parameter)]

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self._loss.model.named_parameters() if p.requires_grad)

    def time_every_step(self) -> None:
        """Have DDP's own logging measure every step."""
        watch(self._wrapped.torch_ddp)

    def step_times(self) -> StepTimes | None:
        """Return what DDP has logged of the last step."""
        return reducing(self._wrapped.torch_ddp)

    def reduction_facts(self) -> dict[str, Any]:
        """Return what DDP has logged of its buckets."""
        return reduction(self._wrapped.torch_ddp)

    def reduce_by(self, hook: Hook) -> bool:
        """Register a communication hook of DDP's."""
        if self._wrapped.torch_ddp is None:
            return False
        self._wrapped.torch_ddp.register_comm_hook(None, hook)
        return True

    def before_rows_travel(self, change: Rows) -> bool:
        """Change the gradients of sparse tables before each reduction."""
        tables = self._wrapped.reduced_tables
        if tables is None:
            return False
        tables.before_reduction = change
        return True

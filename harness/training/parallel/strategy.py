"""What training, its proof and its faults ask of a way in which ranks train one model; nothing else of it may be seen."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from harness.training.loss import LossModule
from harness.training.parallel.comm_hooks import Hook
from harness.training.parallel.sparse import Rows


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, in seconds.

    Attributes:
        compute_s: Forward and backward, without waiting for other ranks.
        comm_exposed_s: From the first bucket's departure to the last one's arrival, less what the backward hid.
    """

    compute_s: float
    comm_exposed_s: float


class Strategy(Protocol):
    """How ranks train one model, whose forward and loss are one module; all ranks call its methods alike."""

    def data_rank(self) -> tuple[int, int]:
        """Return which part of each batch is this rank's: its number, and of how many."""

    def wrap(self, loss: LossModule) -> None:
        """Make ranks train the model within ``loss`` as one, from equal parameters on; collective."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return what the module returns for this rank's part of a batch, None where it has none.

        Raises:
            ConfigError: A setting of the strategy does not suit the module.
        """

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Have gradients of a piece stay on this rank meanwhile; those of the ``last`` are reduced with all before."""

    def clip(self, values: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients, as they lie on this rank, so that their norm over the whole model is at most ``max_norm``."""

    def full_state(self) -> Mapping[str, Any]:
        """Return the state of the whole bare model, as ``state_dict()`` of one process does, on rank 0."""

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return the whole gradient of each trained parameter of the bare model, not a copy where it lies here."""

    def unreduced(self) -> list[str]:
        """Return the names of trained parameters of the bare model whose gradients nobody reduces."""

    def time_every_step(self) -> None:
        """Have every step from now on measured, as far as the strategy can."""

    def step_times(self) -> StepTimes | None:
        """Return how the last step spent its time; None where that is not known."""

    def reduction_facts(self) -> dict[str, Any]:
        """Return how a run's gradients travelled; empty where that is not known."""

    def reduce_by(self, hook: Hook) -> bool:
        """Let buckets of gradients be reduced by ``hook``; return whether there are any. For faults."""

    def before_rows_travel(self, change: Rows) -> bool:
        """Let ``change`` at sparse gradients before they are reduced; return whether there are any. For faults."""

"""What is verified: the training of a plan, as this rank takes part in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.run.folder import RunDir
from harness.run.plan import TrainPlan
from harness.training.seat import Seat
from harness.training.trainer import Trainer
from harness.verify.capture import Captured

MakeTrainer = Callable[[TrainPlan], Trainer]


@dataclass(frozen=True)
class Subject:
    """A training under verification.

    Attributes:
        plan: What is trained.
        make_trainer: Makes this rank's trainer of a plan.
        seat: Who this process is.
        folder: Of the run.
    """

    plan: TrainPlan
    make_trainer: MakeTrainer
    seat: Seat
    folder: RunDir

    @property
    def is_rank_0(self) -> bool:
        """Whether this process replays and writes the evidence down."""
        return self.seat.rank == 0

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.seat.world_size > 1:
            dist.barrier()

    def exchange(self, captured: Captured) -> list[Captured]:
        """Return all ranks' captures on rank 0; they come as files, so that no reduction is checked by a reduction."""
        if not self.is_rank_0:
            torch.save(captured, self.folder.capture(self.seat.rank))
        # No file is read before it is whole.
        self.meet()
        if not self.is_rank_0:
            return []
        others = []
        for rank in range(1, self.seat.world_size):
            path = self.folder.capture(rank)
            # An object of ours and not tensors alone, from a file that a rank of this run has just written.
            others.append(torch.load(path, map_location=self.seat.device, weights_only=False))
            # A capture may be as large as the model, and is of use only once.
            path.unlink()
        return [captured, *others]

"""Injecting the fault of a plan into the ranks of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from harness.run.faults import FAULTS
from harness.run.plan import TrainPlan
from harness.training.recipe import Recipe
from harness.training.seat import Seat
from harness.training.trainer import Trainer

# Each of these registers its injections.
from harness.verify.faults import local, optimizer, reduction, reporting, samples, state  # noqa: F401
from harness.verify.faults.seams import INJECTIONS


def trainers(recipe: Recipe, dataset: Any, seat: Seat) -> Callable[[TrainPlan], Trainer]:
    """Return what makes the trainer of a plan, with the plan's fault in it."""
    # A copy: the model may need what dataset() has found out, and nothing is to pass from one training to the next.
    return lambda plan: inject(Trainer(plan, copy.copy(recipe), dataset, seat))


def inject(trainer: Trainer) -> Trainer:
    """Return the trainer with its plan's fault in it, if the plan has one.

    Raises:
        DoesNotApply: It has no place in this recipe's training.
    """
    plan = trainer.plan
    if plan.fault is not None and plan.fault in INJECTIONS:
        size = FAULTS[plan.fault].size if plan.fault_size is None else plan.fault_size
        INJECTIONS[plan.fault](trainer, size)
    return trainer


@contextmanager
def seated(plan: TrainPlan, seat: Seat) -> Iterator[Seat]:
    """Yield the seat that this process takes; where each process trains alone, one in a world of 1 that knows no group."""
    if plan.fault != "each_process_alone":
        yield seat
        return
    # The group is there and stays: it only seems not to be, for whoever asks.
    joined = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield Seat(0, 1, seat.device)
    finally:
        dist.is_initialized = joined

"""Faults in the optimizer's step and the learning rate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.training.trainer import Trainer
from harness.verify.faults.seams import CHOSEN, around_update, dense_parameters, injection, require


@injection
def lr_times_ranks(trainer: Trainer, size: float | None) -> None:
    """Multiply the learning rate by the number of ranks, or by 1 + ``size``."""
    _scale_lr(trainer, trainer.seat.world_size if size is None else 1 + size)


@injection
def lr_off_on_one_rank(trainer: Trainer, size: float | None) -> None:
    """Multiply the learning rate of rank 1 by 1 + ``size``."""
    if trainer.seat.rank == CHOSEN:
        _scale_lr(trainer, 1 + (size or 0))


def _scale_lr(trainer: Trainer, factor: float) -> None:
    for group in trainer.optimizer.param_groups:
        # Schedulers compute from the initial rate, and would undo a change of the present one.
        for key in {"lr", "initial_lr"} & group.keys():
            group[key] *= factor
    for scheduler in _schedulers(trainer.scheduler):
        scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]


def _schedulers(scheduler: LRScheduler | None) -> list[LRScheduler]:
    """Return a scheduler, and those that it is made of, which know the first learning rates."""
    # Private to torch: SequentialLR and ChainedScheduler have no other name for their parts.
    inner = getattr(scheduler, "_schedulers", [])
    return [part for part in (scheduler, *inner) if part is not None and hasattr(part, "base_lrs")]


@injection
def scheduler_stepped_by_each_rank(trainer: Trainer, size: float | None) -> None:
    """Step the scheduler as often as there are ranks."""
    require(trainer.scheduler is not None, trainer, f"{type(trainer.recipe).__name__} has no scheduler")
    assert trainer.scheduler is not None
    scheduler = trainer.scheduler

    def update(step: int, original: Callable[[], None]) -> None:
        original()
        for _ in range(trainer.seat.world_size - 1):
            scheduler.step()

    around_update(trainer, update)


@injection
def weight_decay_on_one_rank(trainer: Trainer, size: float | None) -> None:
    """Shrink rank 1's first tensor by ``size`` after each step: by default what moves a number by about 1 ulp."""
    _, parameter = dense_parameters(trainer)[0]
    decay = torch.finfo(trainer.dtype).eps if size is None else size

    def update(step: int, original: Callable[[], None]) -> None:
        original()
        if trainer.seat.rank == CHOSEN:
            with torch.no_grad():
                parameter.mul_(1 - decay)

    around_update(trainer, update)


@injection
def parameter_not_in_optimizer(trainer: Trainer, size: float | None) -> None:
    """Take the last parameter out of the optimizer."""
    groups = [group for group in trainer.optimizer.param_groups if group["params"]]
    require(sum(len(group["params"]) for group in groups) > 1, trainer, "the optimizer has one parameter")
    # Never the only one: an optimizer without parameters would be another fault.
    del groups[-1]["params"][-1]


@injection
def momentum_lost(trainer: Trainer, size: float | None) -> None:
    """Empty the optimizer's state before the second step."""
    name = type(trainer.optimizer).__name__
    require(_keeps_state(trainer.optimizer), trainer, f"{name} without momentum keeps no state")

    def update(step: int, original: Callable[[], None]) -> None:
        # Before the first step there is no state to lose.
        if step == 1:
            trainer.optimizer.state.clear()
        original()

    around_update(trainer, update)


def _keeps_state(optimizer: Optimizer) -> bool:
    # All others of torch's keep some state in any case.
    return not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups)


@injection
def one_rank_skips_a_step(trainer: Trainer, size: float | None) -> None:
    """Let rank 1 leave out ``size`` of the optimizer's steps, from the second on; its scheduler goes on."""

    def update(step: int, original: Callable[[], None]) -> None:
        if trainer.seat.rank != CHOSEN or not 1 <= step <= (size or 1):
            original()
        elif trainer.scheduler is not None:
            trainer.scheduler.step()

    around_update(trainer, update)

"""What injections share: the registry, the seams of a step that they patch, and what they must know of a recipe.

An injection gets a trainer that is whole and right, and patches one seam of it. All ranks inject, at the same place; a fault of
one rank then acts on rank 1.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.run.faults import FAULTS
from harness.training.batch import moved
from harness.training.digest import value_digest
from harness.training.loader import collate_of, fetch
from harness.training.parallel.sparse import sparse_tables
from harness.training.state import random_states, undisturbed_random
from harness.training.trainer import Trainer

CHOSEN = 1
"""The rank on which a fault of one rank is."""

Injection = Callable[[Trainer, float | None], None]
INJECTIONS: dict[str, Injection] = {}


class DoesNotApply(ConfigError):
    """A fault that cannot be in this recipe's training: all ranks say so alike, before the first step."""


def injection(function: Injection) -> Injection:
    """Register the injection of the fault that has the function's name."""
    assert function.__name__ in FAULTS
    INJECTIONS[function.__name__] = function
    return function


def require(applies: bool, trainer: Trainer, reason: str) -> None:
    """Refuse a fault that has no place here.

    Raises:
        DoesNotApply: ``applies`` is False; it must be the same on all ranks.
    """
    if not applies:
        raise DoesNotApply(f"fault={trainer.plan.fault} does not apply: {reason}.")


# --- tensors -------------------------------------------------------------------------------------------------------------


def dense_parameters(trainer: Trainer) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters whose gradients are dense.

    Raises:
        DoesNotApply: There is none.
    """
    sparse = {id(table) for table in sparse_tables(trainer.model)}
    dense = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in sparse]
    require(bool(dense), trainer, "all gradients are sparse")
    return dense


def largest(trainer: Trainer) -> nn.Parameter:
    """Return the dense parameter with most numbers."""
    return max(dense_parameters(trainer), key=lambda named: named[1].numel())[1]


def flip_bit(values: Tensor, index: int, bit: float | None) -> None:
    """Flip one bit of one number of a dense tensor, in place; bit 0 is the least significant.

    Raises:
        ConfigError: The number has no such bit.
    """
    width = values.element_size() * 8
    number = int(bit or 0)
    # The sign's bit is not a power of two in a signed integer, and of a zero it changes nothing.
    if number >= width - 1:
        raise ConfigError(f"fault.size={number} is not a bit below the sign's of a number of {width} bits.")
    # The same memory read as integers: arithmetic on the number itself would round.
    integers = values.detach().view(-1).view(torch.int64 if width == 64 else torch.int32)
    integers[index] ^= 1 << number


def next_numbers(values: Tensor, towards: Tensor, steps: int) -> Tensor:
    """Return ``values`` so many representable numbers further towards ``towards``."""
    for _ in range(steps):
        values = torch.nextafter(values, towards)
    return values


# --- seams of a step -----------------------------------------------------------------------------------------------------


def after_reduction(trainer: Trainer, change: Callable[[int], None]) -> None:
    """Call ``change`` with the number of the step whenever the gradients of a step were reduced."""
    accumulate, numbers = trainer.accumulate, itertools.count()

    def faulty(batch: Sequence[int], loaded: list[tuple[int, Any]]) -> tuple[float, float]:
        # Its last backward has reduced by the time it returns.
        sums = accumulate(batch, loaded)
        with torch.no_grad():
            change(next(numbers))
        return sums

    trainer.accumulate = faulty  # type: ignore[method-assign]


def keep_local(parameter: nn.Parameter) -> Callable[[], Tensor]:
    """Return what returns the parameter's local gradient: of the last backward, added to what was there before."""
    kept: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        # A tensor's hook sees the gradient before it is added to .grad, and before DDP sees it.
        kept[:] = [gradient.detach().clone() if parameter.grad is None else parameter.grad + gradient]

    parameter.register_hook(keep)
    return lambda: kept[0]


def around_update(trainer: Trainer, update: Callable[[int, Callable[[], None]], None]) -> None:
    """Let ``update`` take the place of the optimizer's step and the scheduler's; it gets the number of the step, and both."""
    original, numbers = trainer.update, itertools.count()

    def faulty() -> None:
        update(next(numbers), original)

    trainer.update = faulty  # type: ignore[method-assign]


# --- trying what a recipe does -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """What the recipe's loss did with the first global batch, over all ranks.

    Attributes:
        shares: Samples of each rank, or items where losses are sums over items.
        draws_random: Some rank's forward moved a random generator on.
    """

    shares: list[float]
    draws_random: bool


def tried(trainer: Trainer) -> Tried:
    """Try the recipe's loss on a copy of the model; collective, and without a trace."""
    own_part = trainer.batches.shard(trainer.batches.epoch_batches(0)[0])
    outcome: tuple[float, bool] = (0.0, False)
    if own_part:
        with undisturbed_random(), torch.no_grad():
            outcome = _try(trainer, own_part)
    # From all: a rank without samples has tried nothing, and refuses or goes on with the others.
    outcomes: list[Any] = [outcome] * trainer.seat.world_size
    if trainer.seat.world_size > 1:
        dist.all_gather_object(outcomes, outcome)
    return Tried([share for share, _ in outcomes], any(draws for _, draws in outcomes))


def _try(trainer: Trainer, own_part: Sequence[int]) -> tuple[float, bool]:
    samples = collate_of(trainer.recipe)(fetch(trainer.dataset, own_part))
    # After loading: what the data set draws is not drawn by forward.
    before = value_digest(random_states())
    # On a copy, because forward may move buffers even without gradients.
    loss = trainer.recipe.loss(copy.deepcopy(trainer.model).train(), moved(samples, trainer.seat.device, trainer.dtype))
    share = float(loss[1]) if isinstance(loss, tuple) else float(len(own_part))
    return share, before != value_digest(random_states())

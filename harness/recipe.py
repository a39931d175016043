"""What a recipe is: a plain class that names data, model, optimizer and loss, and nothing of ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Metrics = Mapping[str, tuple[Tensor | float, Tensor | float]]


class Recipe(Protocol):
    """What every recipe has.

    It may also have ``prepare()``, called on one rank of each machine before anybody calls ``dataset()``;
    ``scheduler(optimizer)`` or ``scheduler(optimizer, num_steps)``, whose result is stepped after every optimizer step;
    ``eval_dataset()`` with ``evaluate(model, batch)``, which returns name -> (sum, count); ``collate(samples)``; and
    ``batches(order, batch_size)``, which groups an epoch's shuffled sample numbers into global batches.
    """

    def dataset(self) -> Dataset[Any]:
        """Return the training samples, the same on every rank; they are sharded by their numbers."""

    def model(self) -> nn.Module:
        """Return a new model; called after seeding."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the model's parameters."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the mean over the local batch, or (sum, number of items) where items differ, as tokens do."""


def make_recipe(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe that ``_target_`` and its keys describe, nested ``_target_`` keys included.

    Raises:
        Exception: Whatever importing or making it raised, as it was.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(dict(settings))
    except InstantiationException as error:
        # Hydra's own text repeats the cause's and hides where it happened.
        raise error.__cause__ or error from None


def make_scheduler(recipe: Recipe, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
    """Return the recipe's scheduler, told the number of steps if it asks for it; None without one."""
    make = getattr(recipe, "scheduler", None)
    if make is None:
        return None
    asked = list(inspect.signature(make).parameters.values())
    if any(each.name == "num_steps" for each in asked):
        return make(optimizer, num_steps=num_steps)
    # By another name, but needed; further ones with defaults are the recipe's own.
    needs_second = len(asked) > 1 and asked[1].default is inspect.Parameter.empty and asked[1].kind in _POSITIONAL
    return make(optimizer, num_steps) if needs_second else make(optimizer)

"""A recipe's loss as a module, and what a step of it comes to."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import ConfigError, HarnessError
from harness.run.plan import TrainPlan
from harness.training.parallel.sparse import sparse_tables
from harness.training.recipe import Recipe
from harness.training.state import DTYPES


class NonFinite(HarnessError):
    """A loss that is NaN or infinite, on this rank or, as a consequence, on another."""

    def __init__(self, message: str, is_consequence: bool) -> None:
        super().__init__(message)
        self.is_consequence = is_consequence


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
        # Where DDP searches for unused parameters, it finds out by itself that a rank without samples uses none.
        self._uses_all = not plan.ddp.find_unused_parameters
        self._device_type = device.type

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return (mean, None) or (sum, number of items), as the recipe does; shapes []."""
        if batch is None:
            return self._zero(), None
        with torch.autocast(self._device_type, torch.bfloat16) if self._autocast else nullcontext():
            loss, items = loss_and_items(self.recipe.loss(self.model, batch), f"{type(self.recipe).__name__}.loss()")
        # In the loss's own type: a wider alarm would make the loss wider.
        return loss + self.alarm.sum().to(loss.dtype), items

    def _zero(self) -> Tensor:
        """Return 0, which depends on what DDP waits for; not on sparse tables, which nobody waits for."""
        sparse = {id(table) for table in sparse_tables(self.model)}
        dense = [p for p in self.model.parameters() if p.requires_grad and id(p) not in sparse]
        # The sum of no numbers is 0 and still depends on the parameter; 0 * p would be NaN where a weight is infinite.
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
    # Before the alarm is added, with which any loss has a gradient: training would go on, and learn nothing.
    if not loss.requires_grad:
        raise ConfigError(f"{source} returned a tensor that depends on no trainable parameter: was it detached?")
    if items is None:
        return loss.reshape(()), None
    if not isinstance(items, Tensor | Real) or (isinstance(items, Tensor) and items.numel() != 1):
        what = f"a tensor of shape {tuple(items.shape)}" if isinstance(items, Tensor) else f"a {type(items).__name__}"
        raise ConfigError(f"{source} returned (loss, {what}): the second is to be the number of items in the sum. {wanted}")
    # A Python float would become float32, which counts tokens one by one up to 2^24 only.
    exact = None if isinstance(items, Tensor) else torch.float64
    return loss.reshape(()), torch.as_tensor(items, dtype=exact, device=loss.device).reshape(())

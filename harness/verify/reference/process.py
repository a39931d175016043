"""One process that trains the recipe alone: what it makes of it at birth, and what it has that ranks could have otherwise."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.run.plan import TrainPlan
from harness.training.batch import moved
from harness.training.digest import Digests, digests, state_digests
from harness.training.loader import epoch_batches
from harness.training.recipe import Recipe, learning_rates, make_recipe, make_scheduler
from harness.training.seeds import derive, seed_everything
from harness.training.state import in_precision, widened
from harness.training.weights import load_weights
from harness.verify.one_process import WorldOfOne


class SingleProcess:
    """A training of the run's recipe that nobody shares. Its recipe hears that it is one process of one.

    Args:
        plan: Of the run.
        device: Of this process.
        num_steps: Of the whole run, for the scheduler.

    Attributes:
        recipe: Made anew.
        dataset: Its samples.
        model: Put into the run's state before whatever is computed with it.
        optimizer: Takes every step of the run, from birth on.
        scheduler: Of that optimizer; None where the recipe has none.
        birth: Digests of parameters, buffers and optimizer state at step 0.
        learnt: What the recipe has found out of its data and model, and may use in its loss.
    """

    def __init__(self, plan: TrainPlan, device: torch.device, num_steps: int) -> None:
        self.plan = plan
        self.device = device
        self.num_steps = num_steps
        self._world = WorldOfOne()
        # Whatever the recipe asks while it is made, it hears what a single process would.
        with self.alone():
            self._make()

    def _make(self) -> None:
        plan = self.plan
        self.recipe: Recipe = make_recipe(plan.recipe)
        # To tell what dataset() and model() leave in the recipe from what its constructor did.
        # A copy of what it holds now: what dataset(), model() and optimizer() add is told from it.
        made = dict(vars(self.recipe))
        seed_everything(derive(plan.seed, "dataset"))
        self.dataset: Any = self.recipe.dataset()
        self.model = self._born(torch.float64 if plan.precision == "float64" else torch.float32)
        self.optimizer = self.recipe.optimizer(self.model)
        # Now, because the model and this optimizer go on with every step that is checked.
        self.birth: Digests = {**state_digests(self.model, self.optimizer), **digests(self.model.named_buffers())}
        self.scheduler = make_scheduler(self.recipe, self.optimizer, self.num_steps)
        self.learnt = {name: value for name, value in vars(self.recipe).items() if made.get(name, self) is not value}

    def _born(self, dtype: torch.dtype) -> nn.Module:
        seed_everything(derive(self.plan.seed, "model"))
        model = in_precision(self.recipe.model(), self.device, dtype)
        if self.plan.weights is not None:
            load_weights(model, self.plan.weights, self.plan.weights_partial)
        return model

    def alone(self) -> AbstractContextManager[None]:
        """Have the recipe hear meanwhile that it is alone."""
        return self._world.entered()

    @cached_property
    def wide_model(self) -> nn.Module:
        """The model in float64: made anew, because a copy would lack the hooks on its tensors, and not every model has one.

        Raises:
            ConfigError: The recipe returned the model that it had returned before.
        """
        with self.alone():
            wide = self._born(torch.float64)
        # It has been cast in place, and the run's own precision is gone.
        if wide is self.model:
            raise ConfigError(f"{type(self.recipe).__name__}.model() returned one module twice: make a new one each time.")
        # optimizer() may have frozen some.
        trained = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        for name, parameter in wide.named_parameters():
            parameter.requires_grad_(trained[name])
        return wide

    @cached_property
    def wide_recipe(self) -> Recipe:
        """The recipe with its own tensors in float64."""
        wide: Recipe = widened(self.recipe)
        return wide

    def loss(
        self, recipe: Recipe, model: nn.Module, batch: Any, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (mean, None) or (sum, number of items), as ``recipe`` does, in ``dtype``, or for None in the run's."""
        wide = dtype == torch.float64 or (dtype is None and self.plan.precision == "float64")
        # A comparison in a type of its own choice is not to be narrowed by autocast.
        narrow = self.plan.precision == "bfloat16" and dtype is None
        batch = moved(batch, self.device, torch.float64 if wide else torch.float32)
        with torch.autocast(self.device.type, torch.bfloat16) if narrow else nullcontext():
            loss = recipe.loss(model, batch)
        return loss if isinstance(loss, tuple) else (loss, None)

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        return len(self.dataset)

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the global batches of an epoch."""
        plan = self.plan
        with self.alone():
            batches = epoch_batches(self.recipe, self.num_samples, plan.global_batch_size, plan.seed, epoch)
        return [list(batch) for batch in batches]

    def learning_rates(self, number: int) -> list[list[float]]:
        """Return the learning rates, of each parameter group, that the recipe declares for the first steps."""
        with self.alone():
            return learning_rates(copy.copy(self.recipe), self.model, self.num_steps, number)

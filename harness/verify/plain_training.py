"""A plain loop of one process that trains freely: what older rules hold the ranks' losses and parameters against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from harness.run.plan import TrainPlan
from harness.training.batch import moved
from harness.training.loader import collate_of, epoch_batches, fetch
from harness.training.parallel.gradients import clip_, gradient_values
from harness.training.recipe import Recipe, make_recipe, make_scheduler
from harness.training.seeds import derive, seed_everything, seed_rank
from harness.training.state import DTYPES, in_precision
from harness.verify.one_process import WorldOfOne


@dataclass(frozen=True)
class Alone:
    """One process that trains freely.

    Attributes:
        losses: Of each step, over the whole global batch.
        parameters: At the end, by name.
    """

    losses: Sequence[float]
    parameters: dict[str, Tensor]


def train_alone(plan: TrainPlan, dataset: Any, device: torch.device, steps: int) -> Alone:
    """Train one process on whole global batches, as a plain loop does."""
    with WorldOfOne().entered():
        return _train_alone(plan, dataset, device, steps)


def _train_alone(plan: TrainPlan, dataset: Any, device: torch.device, steps: int) -> Alone:
    # Made anew: it may ask for the number of ranks as it is made.
    recipe = make_recipe(plan.recipe)
    model, losses = _born(recipe, plan, device), []
    optimizer = recipe.optimizer(model)
    batches = list(islice(_batches(recipe, plan, len(dataset)), steps))
    # For the length of the whole run, though only its first steps are taken: a schedule depends on it.
    scheduler = make_scheduler(recipe, optimizer, plan.steps or _num_steps(recipe, plan, len(dataset)))
    for batch in batches:
        optimizer.zero_grad()
        samples = moved(collate_of(recipe)(fetch(dataset, batch)), device, DTYPES[plan.precision])
        narrow = plan.precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16) if narrow else nullcontext():
            loss = recipe.loss(model, samples)
        # Over all items at once, which is what the ranks together have to come to.
        mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        mean.backward()
        if plan.clip_norm is not None:
            clip_(gradient_values(model.parameters()), plan.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(mean.detach()))
    return Alone(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def _born(recipe: Recipe, plan: TrainPlan, device: torch.device) -> nn.Module:
    recipe.dataset()  # the model may need what it finds out
    seed_everything(derive(plan.seed, "model"))
    model = in_precision(recipe.model(), device, DTYPES[plan.precision]).train()
    # With rank 0's stream, by which a run of one rank draws the same.
    seed_rank(plan.seed, 0)
    return model


def _batches(recipe: Recipe, plan: TrainPlan, num_samples: int) -> Iterator[Sequence[int]]:
    for epoch in count():
        yield from epoch_batches(recipe, num_samples, plan.global_batch_size, plan.seed, epoch)


def _num_steps(recipe: Recipe, plan: TrainPlan, num_samples: int) -> int:
    epochs = range(plan.epochs or 0)
    return sum(len(epoch_batches(recipe, num_samples, plan.global_batch_size, plan.seed, epoch)) for epoch in epochs)

"""What a recipe makes, looked at before it is trained: its model and its optimizer."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from harness.errors import ConfigError
from harness.run.plan import TrainPlan
from harness.training.compiling import compiled
from harness.training.parallel.batchnorm import convert_sync_batchnorm
from harness.training.parallel.collectives import require_one_model
from harness.training.recipe import Recipe
from harness.training.state import DTYPES, in_precision
from harness.training.weights import load_weights


def build_model(recipe: Recipe, plan: TrainPlan, device: torch.device) -> nn.Module:
    """Return the recipe's model in the plan's precision, on the device; the same on all ranks.

    Raises:
        ConfigError: It is no model that can be trained here, or ``weights`` are not its own.
        Mismatch: The recipe makes another model on some ranks.
    """
    model = recipe.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{type(recipe).__name__}.model() returned a {type(model).__name__}, not an nn.Module.")
    name = type(recipe).__name__
    if any(is_lazy(p) for p in model.parameters()):
        raise ConfigError(f"{name}.model() has lazy layers without a shape yet. Run a batch through the model there.")
    if any(p.is_complex() for p in model.parameters()):
        raise ConfigError(f"{name}.model() has complex parameters, which would lose a part. Hold them as pairs of real ones.")
    model = in_precision(model, device, DTYPES[plan.precision])
    if plan.weights is not None:
        load_weights(model, plan.weights, plan.weights_partial)
    # Before DDP, which would wait for ever for a buffer that one rank alone has.
    require_one_model(model, None)
    # After the comparison, which tells more where only some ranks have frozen all.
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"{name}.model() has no parameter to train.")
    if plan.sync_bn:
        model = convert_sync_batchnorm(model)
    # Last: the conversion changes classes, on which compiled code rests.
    return compiled(model) if plan.compile else model


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return the recipe's optimizer of a model.

    Raises:
        ConfigError: It is none of torch's, or wants to evaluate the loss itself.
    """
    optimizer = recipe.optimizer(model)
    returned = f"{type(recipe).__name__}.optimizer() returned a {type(optimizer).__name__}"
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{returned}, not an optimizer of torch.")
    # LBFGS, say, would run forward and backward, and so the reduction, as often as it likes.
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{returned}, whose step() takes a closure that evaluates the loss again. Use one that does not.")
    return optimizer

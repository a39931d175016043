"""What a recipe is: a plain class that names data, model, optimizer and loss, and nothing of ours."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from harness.errors import ConfigError

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


REQUIRED = ("dataset", "model", "optimizer", "loss")
"""Methods that every recipe has."""


def make_recipe(settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe that ``_target_`` and its keys describe, nested ``_target_`` keys included.

    Raises:
        ConfigError: There is no such class, or its own checks refuse a setting: with a ValueError about ``recipe.NAME=``.
        Exception: Whatever else importing or making it raised, as it was.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    target = str(settings["_target_"])
    # First: of a name that is not there Hydra says neither where it looked nor what is close to it.
    _find(target)
    try:
        recipe: Recipe = instantiate(dict(settings))
    except InstantiationException as error:
        # Hydra's own text repeats the cause's and hides where it happened.
        cause = error.__cause__ or error
        if isinstance(cause, ValueError) and str(cause).startswith("recipe."):
            raise ConfigError(str(cause)) from None
        # Python has no exception of its own for it.
        if isinstance(cause, TypeError) and "unexpected keyword argument" in str(cause):
            raise ConfigError(f"recipe._target_={target} does not take all keys of the recipe's YAML: {cause}.") from None
        # The recipe's own mistake, with the traceback that leads there.
        raise cause from None
    # One that only measures communication has no training.
    needed = () if hasattr(recipe, "measure") else REQUIRED
    missing = [name for name in needed if not callable(getattr(recipe, name, None))]
    if missing:
        raise ConfigError(f"recipe._target_={target} has no method {' and no method '.join(missing)}, which a recipe needs.")
    return recipe


def _find(target: str) -> None:
    """Import what holds the class of that name.

    Raises:
        ConfigError: There is none; the closest name is given.
    """
    module, _, name = target.rpartition(".")
    parent: Any = None
    for part in module.split(".") if module else []:
        path = f"{parent.__name__}.{part}" if parent else part
        # Within a class, or made by a package when it is imported: no module to import.
        if isinstance(parent, type) or (inspect.ismodule(parent) and hasattr(parent, part)):
            parent = getattr(parent, part, None)
            continue
        try:
            parent = importlib.import_module(path)
        except ModuleNotFoundError as error:
            # The module is there, and itself imports one that is not.
            if error.name != path:
                raise
            raise ConfigError(_no_such(target, f"module {path}", part, parent, _modules_of(parent))) from None
    if not hasattr(parent, name):
        raise ConfigError(_no_such(target, f"class {name}" + (f" in {module}" if module else ""), name, parent, dir(parent)))


def _modules_of(package: Any) -> list[str]:
    # Without a package: what lies in the folders of sys.path.
    return [module.name for module in pkgutil.iter_modules(package.__path__ if hasattr(package, "__path__") else None)]


def _no_such(target: str, what: str, name: str, where: Any, known: Iterable[str]) -> str:
    closest = difflib.get_close_matches(name, known, 1)
    prefix = f"{where.__name__}." if where is not None else ""
    hint = f" Did you mean {prefix}{closest[0]}?" if closest else ""
    places = "the current folder, in PYTHONPATH and beside the script"
    return f"recipe._target_={target}: there is no {what}.{hint} Modules are looked for in {places}."


def learning_rates(recipe: Recipe, model: nn.Module, num_steps: int, number: int) -> list[list[float]]:
    """Return the learning rates, of each parameter group, of the first ``number`` of ``num_steps`` steps."""
    # A new one, which takes no step: the rates follow from the scheduler alone.
    optimizer = recipe.optimizer(model)
    scheduler = make_scheduler(recipe, optimizer, num_steps)
    rates = []
    with warnings.catch_warnings():
        # Of an optimizer that was not stepped, and of more steps than a scheduler has.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(number):
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            if scheduler is not None:
                scheduler.step()
    return rates


def make_scheduler(recipe: Recipe, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
    """Return the recipe's scheduler, told the number of steps if it asks for it; None without one.

    Raises:
        ConfigError: It is not one of torch's that can be stepped without a metric.
    """
    make = getattr(recipe, "scheduler", None)
    if make is None:
        return None
    made = _call_scheduler(make, optimizer, num_steps)
    # ReduceLROnPlateau is an LRScheduler too, but its step() wants a metric.
    if made is not None and (not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau)):
        raise ConfigError(
            f"{type(recipe).__name__}.scheduler() returned a {type(made).__name__}. Return one scheduler of torch's that is "
            "stepped after every optimizer step, without a metric; SequentialLR and ChainedScheduler join several."
        )
    return made


def _call_scheduler(make: Callable[..., Any], optimizer: Optimizer, num_steps: int) -> Any:
    asked = list(inspect.signature(make).parameters.values())
    if any(parameter.name == "num_steps" for parameter in asked):
        return make(optimizer, num_steps=num_steps)
    # By another name, but needed; further ones with defaults are the recipe's own.
    needs_second = len(asked) > 1 and asked[1].default is inspect.Parameter.empty and asked[1].kind in _POSITIONAL
    return make(optimizer, num_steps) if needs_second else make(optimizer)

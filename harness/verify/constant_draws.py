"""Constants in place of what torch draws at random, so that a batch and its shards can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MOST_DRAWS = 20_000
"""After so many draws a loop is taken to wait for a number other than the one that it gets."""

_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")

_DROPOUTS = {
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"),
    *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Function -> position of its ``dropout_p``."""


class UnknownDraw(Exception):
    """An operation draws random numbers for which there is no constant; the text names it."""


class ConstantDraws(TorchDispatchMode):
    """Within it torch's operations return constants where they draw random numbers, and leave every generator as it is.

    The constants depend on an operation's own parameters, not on a batch's size or a sample's place in it. Dropout is the
    identity, that of attention and between recurrent layers too. Backward may run outside, but where it calls forward again
    (checkpointing) it must run within. Numbers that Python or numpy draw, or that a kernel draws unknown to torch, stay random.

    Raises:
        UnknownDraw: On an operation that draws in a way not known here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._undropped = _Undropped()
        self._draws = 0

    def __enter__(self) -> Self:
        """Begin."""
        self._draws = 0
        self._undropped.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        """End."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._undropped.__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation that draws nothing; for another return constants."""
        if not _may_draw(func):
            return func(*args, **(kwargs or {}))
        given = _given(func, args, kwargs or {})
        if _is_off(func, given):
            return func(*args, **(kwargs or {}))
        self._draws += 1
        if self._draws > MOST_DRAWS:
            raise UnknownDraw(f"{func} is asked for random numbers again and again, and seems to refuse what it gets")
        return _constant(func, given)


class _Undropped(TorchFunctionMode):
    """Switches dropout off where torch would hand it down to a kernel, whose backward would otherwise apply it still."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", ""), dict(kwargs or {})
        # By name, because torch and torch.nn.functional each have a function of it.
        if name in _DROPOUTS:
            return _identity(name, *args, **named)
        if name in _RECURRENT and len(args) > 6:
            # A packed sequence has its batch sizes before the states, so that the weights come fourth.
            args = _with_zero(args, 6 if isinstance(args[3], list | tuple) else 5)
        elif name in _ATTENTION and len(args) > _ATTENTION[name]:
            args = _with_zero(args, _ATTENTION[name])
        elif name in _ATTENTION:
            named["dropout_p"] = 0.0
        return func(*args, **named)


def _identity(name: str, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> Tensor:
    return input if inplace or name.endswith("_") else input.clone()


def _with_zero(args: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    return (*args[:position], 0.0, *args[position + 1 :])


@cache
def _may_draw(func: Any) -> bool:
    # The tag is public, but not every operation that takes a generator has it; what an operation takes, its schema alone tells.
    return torch.Tag.nondeterministic_seeded in func.tags or any("Generator" in str(a.type) for a in func._schema.arguments)


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with those left out that say how a tensor is made and were not given."""
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.name not in _OPTIONS}
    return {**defaults, **{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}


def _is_off(func: Any, given: Mapping[str, Any]) -> bool:
    """Return whether an operation that may draw draws nothing this time."""
    if func._schema.name == "aten::_nested_tensor_softmax_with_shape":
        return True
    # Where dropout is switched off above, attention and recurrent layers come here with a chance of 0, and draw nothing.
    chances = [given[name] for name in ("dropout", "dropout_p") if name in given]
    return chances == [0.0] or any(given.get(name) is False for name in ("train", "training"))


def _constant(func: Any, given: Mapping[str, Any]) -> Any:
    namespace, name = func._schema.name.split("::")
    if namespace == "aten" and name in _DROPOUTS:
        return _identity(name, given.get("input", given.get("self")))
    if str(func) == "aten.native_dropout.default":
        return _native_dropout(given)
    value = _value_of(name)
    # An operation of somebody else's may have the name of one of torch's.
    if namespace != "aten" or value is None:
        raise UnknownDraw(f"{func} draws random numbers, for which there is no constant")
    return _placed(given, value(given), name.endswith("_"))


def _value_of(name: str) -> Callable[[Mapping[str, Any]], Any] | None:
    # An operation in place, like another tensor or without side effects draws as the plain one does.
    return _VALUES.get(name.removesuffix("_").removesuffix("_like").removesuffix("_functional"))


def _placed(given: Mapping[str, Any], value: Any, in_place: bool) -> Tensor:
    """Return a number, or a tensor of them, where and as the operation would return what it draws."""
    if in_place:
        return given["self"].copy_(value) if isinstance(value, Tensor) else given["self"].fill_(value)
    made = value if isinstance(value, Tensor) else _filled(given, value)
    return given["out"].resize_(made.shape).copy_(made) if "out" in given else made


def _filled(given: Mapping[str, Any], value: float) -> Tensor:
    options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    # With a size it makes a tensor of that size, and without one a tensor like the one that it is given.
    if "size" in given:
        return torch.full(given["size"], value, **options)
    return torch.full_like(given["self"], value, **options)


def _native_dropout(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Keep all, scaled as backward scales, which is not told here."""
    input, p = given["input"], given["p"]
    # Where p is 1 all is dropped, and 1 / (1 - p) would divide by 0.
    scale = 1.0 if not given["train"] else 0.0 if p == 1 else 1 / (1 - p)
    return input * scale, torch.ones_like(input, dtype=torch.bool)


def _bernoulli(given: Mapping[str, Any]) -> Any:
    """Return, of one chance for all, this: dropout divides by it. Of chances in a tensor, one where there is any."""
    chance = given.get("p", given["self"])
    if isinstance(chance, Tensor):
        return torch.empty_like(given["self"]).copy_(chance > 0)
    return chance if given["self"].is_floating_point() else int(chance > 0)


def _multinomial(given: Mapping[str, Any]) -> Tensor:
    """Return the likeliest category each time; without replacement, the likeliest ones."""
    weights, number = given["self"], given["num_samples"]
    # Stable, so that equal weights are taken in the order of their categories.
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    if given["replacement"]:
        order = order[..., :1].expand(*weights.shape[:-1], number)
    return order[..., :number].clone(memory_format=torch.contiguous_format)


def _randperm(given: Mapping[str, Any]) -> Tensor:
    return torch.arange(given["n"], **{name: given[name] for name in _OPTIONS if given.get(name) is not None})


def _rrelu(given: Mapping[str, Any]) -> Tensor:
    """Return what the middle of the slopes gives; backward finds it in the noise."""
    input = given["self"]
    slopes = torch.ones_like(input).masked_fill_(input <= 0, (given["lower"] + given["upper"]) / 2)
    if "noise" in given:
        given["noise"].copy_(slopes)
    return input * slopes


_VALUES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
    "_standard_gamma": lambda given: given["self"].clone(),
    "bernoulli": _bernoulli,
    "binomial": lambda given: (given["count"] * given["prob"]).floor(),
    "cauchy": lambda given: given["median"] + 0.5 * given["sigma"],
    # The median.
    "exponential": lambda given: math.log(2) / given["lambd"],
    "geometric": lambda given: 1,
    "log_normal": lambda given: math.exp(given["mean"] + 0.5 * given["std"]),
    "multinomial": _multinomial,
    # Not the mean: the deviation would not count in the loss, and have no gradient.
    "normal": lambda given: given["mean"] + 0.5 * given["std"],
    "poisson": lambda given: given["self"].floor(),
    "rand": lambda given: 0.5,
    "randint": lambda given: given.get("low", 0),
    "randn": lambda given: 0.5,
    "random": lambda given: given.get("from", 0),
    "randperm": _randperm,
    "rrelu": _rrelu,
    "rrelu_with_noise": _rrelu,
    "uniform": lambda given: (given["from"] + given["to"]) / 2,
}
"""Operation, without its endings -> what it returns instead."""

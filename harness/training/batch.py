"""Batches of any shape: moved to a device, cast and copied, tensor by tensor."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC
from collections import OrderedDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cached_property, partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def moved(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a batch on the device, in the same nesting; where ``dtype`` is float64, floating-point tensors take it,
    and complex ones its two parts.

    Mappings keep their type where it can be copied and changed; the others become plain dictionaries.
    """

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if dtype == torch.float64 and (value.is_floating_point() or value.is_complex()):
            # is_floating_point() is False of complex numbers, whose parts are to be as wide.
            return value.to(device, torch.complex128 if value.is_complex() else torch.float64, non_blocking=True)
        return value.to(device, non_blocking=True)

    return applied(move, batch)


def copied(batch: Any) -> Any:
    """Return a copy of a batch: not every layout of a tensor can be copied with what holds it."""
    return applied(lambda value: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value), batch)


def applied(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch in the same nesting, with ``function`` of each tensor in it, and of whatever else holds none."""
    # What loaders return most needs nothing of all that, and every step pays for it.
    # Of these types exactly: a named tuple's constructor takes its items one by one.
    if type(batch) in (list, tuple) and all(type(item) is Tensor for item in batch):
        return type(batch)(map(function, batch))
    return apply_to_collection(batch, _Own, partial(_of_own, function))


class _Own(ABC):  # noqa: B024 - it is asked about classes, each once
    """What ``apply_to_collection`` does not make again as it was: leaves, and collections whose constructors take other things.

    It refuses a frozen dataclass, and leaves a field as it is that ``__init__`` does not take. A mapping of any other kind it
    makes by ``kind(OrderedDict)``, where a tokenizer's encoding, say, loses what it holds beside its items.
    """

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        if dataclasses.is_dataclass(kind):
            # A frozen one has a __setattr__ that raises.
            is_plain = kind.__setattr__ is object.__setattr__ and all(field.init for field in dataclasses.fields(kind))
            # A mapping that is a dataclass too (outputs of transformers' models are) holds its items in two places.
            return not is_plain or issubclass(kind, Mapping)
        is_tuple = issubclass(kind, tuple) and not issubclass(kind, PackedSequence)
        return not (is_tuple or kind in (list, dict, OrderedDict, defaultdict))


def _of_own(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return _holding(value, {key: applied(function, inner) for key, inner in value.items()}, function)
    if isinstance(value, PackedSequence):
        # Its constructor wants the lengths on the CPU, wherever the data are.
        others = [name for name in value._fields if name != "batch_sizes"]
        return value._replace(**{name: applied(function, getattr(value, name)) for name in others})
    if isinstance(value, list | UserList | deque):
        return _with_items(value, applied(function, list(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, function)
    return function(value)


def _with_items(value: Any, items: list[Any]) -> Any:
    held = copy.copy(value)
    for number, item in enumerate(items):
        held[number] = item
    return held


def _with_fields(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with ``function`` of its fields; its ``__init__`` may do more than keep them."""
    held = copy.copy(value)
    for field in dataclasses.fields(value):
        # A field that __init__ does not take may never have been set.
        if hasattr(value, field.name):
            # A frozen one refuses to be changed, even by who has just made it.
            object.__setattr__(held, field.name, applied(function, getattr(value, field.name)))
    # What it has computed from its fields, it computes again.
    for name in list(getattr(held, "__dict__", {})):
        if isinstance(getattr(type(held), name, None), cached_property):
            del held.__dict__[name]
    return held


def _holding(batch: Mapping[Any, Any], items: dict[Any, Any], function: Callable[[Any], Any]) -> Mapping[Any, Any]:
    """Return a copy of ``batch`` that holds these items, or the items alone if it cannot do so."""
    if not isinstance(batch, MutableMapping):
        return items
    try:
        held = copy.copy(batch)
        # The dictionary that a mapping keeps its items in would else be one for both, and items kept as attributes too the old.
        own = getattr(held, "__dict__", {})
        for name, value in list(own.items()):
            is_item = name in items and value is batch[name]
            own[name] = items[name] if is_item else copy.copy(value) if isinstance(value, dict) else applied(function, value)
        for key, value in items.items():
            held[key] = value
        # A class that converts what is put into it holds something else than was moved.
        return held if all(held[key] is value for key, value in items.items()) else items
    except Exception:  # of a class of the user's own, which may refuse to be copied or changed in any way
        return items


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses, which stay as they are."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple | UserList | deque):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in dataclasses.fields(value)])

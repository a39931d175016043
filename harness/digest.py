"""Digests of tensors, and of what holds them: equal if and only if the bits are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.errors import ConfigError
from harness.record import joined

Digests = dict[str, str]


def bits(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; a sparse one's rows in the order of their indices."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return memoryview(bytes(bits(tensor.indices())) + bytes(bits(tensor.values())))
    flat = tensor.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def tensor_digest(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits of SHA-256 over type, shape and bits."""
    return _hexadecimal(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + bits(tensor))


def _hexadecimal(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def gradient_digest(gradient: Tensor | None) -> str:
    """Return the same of a gradient; ``none`` without one, and ``zero`` for one of zeros, dense or sparse."""
    if gradient is None:
        return "none"
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return tensor_digest(gradient) if bool(values.any()) else "zero"


def digests(tensors: Iterable[tuple[str, Tensor]]) -> Digests:
    """Return tensor -> digest, in the order given."""
    return {name: tensor_digest(tensor) for name, tensor in tensors}


def optimizer_digests(state: Mapping[Any, Any]) -> Digests:
    """Return the digests of an optimizer's state, named by parameter number and key."""
    return dict(_flat("optimizer", state))


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, Tensor):
        yield prefix, tensor_digest(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _flat(f"{prefix}.{key}", inner)
    elif isinstance(value, set | frozenset):
        yield prefix, joined({value_digest(inner): "" for inner in sorted(value, key=value_digest)})
    elif isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
        yield prefix, _hexadecimal(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif value is None or type(value) in PLAIN:
        yield prefix, repr(value)
    elif isinstance(value, type | FunctionType | BuiltinFunctionType):
        yield prefix, f"{value.__module__}.{value.__qualname__}"
    else:
        yield from _flat(prefix, _parts(value))


PLAIN = (bool, int, float, complex, str, bytes)
"""Types whose representation tells all."""


def _parts(value: object) -> list[Any]:
    """Return what an object is made again of, as :mod:`pickle` sees it; which of its parts are one object does not count.

    Raises:
        ConfigError: It cannot be pickled: then its representation may be its address, and no two of it are equal.
    """
    try:
        made = value.__reduce_ex__(4)
    except Exception as error:
        raise ConfigError(
            f"There is no digest of a {type(value).__name__} ({error}). Batches and the state of optimizers are compared: let "
            "them hold tensors, arrays, plain values, or objects that can be pickled."
        ) from None
    return [made] if isinstance(made, str) else [list(part) if isinstance(part, Iterator) else part for part in made]


def state_digests(model: nn.Module, optimizer: Optimizer) -> Digests:
    """Return the digests of parameters and optimizer state, tensor by tensor."""
    return {**digests(model.named_parameters()), **optimizer_digests(optimizer.state_dict()["state"])}


def kind_digests(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return one digest each of parameters, buffers and optimizer state."""
    return {
        "parameters": joined(digests(model.named_parameters())),
        "buffers": joined(digests(model.named_buffers())),
        "optimizer": joined(optimizer_digests(optimizer.state_dict()["state"])),
    }


def value_digest(value: Any) -> str:
    """Return one digest of all that nested containers and objects hold, such as a loaded batch.

    Raises:
        ConfigError: They hold something that cannot be pickled, or themselves.
    """
    try:
        parts = list(_flat("", value))
    except RecursionError:
        raise ConfigError(f"There is no digest of a {type(value).__name__} in which an object holds itself.") from None
    return _hexadecimal(repr(parts).encode())

"""Digests of tensors, and of what holds them: equal if and only if the bits are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.errors import ConfigError
from harness.run.record import joined

Digests = dict[str, str]


def bits(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor: of a sparse one's indices, in their order, and values; of a nested one's tensors."""
    tensor = tensor.detach()
    if tensor.is_nested or tensor.layout != torch.strided:
        return memoryview(b"".join(bits(part) for part in _strided_parts(tensor)))
    # A conjugate or a negative may be a mark on a view, and numpy would read the memory beneath it.
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # As bytes: numpy has no bfloat16.
    return memoryview(flat.view(torch.uint8).numpy().data)


def _strided_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensors that a sparse or nested one consists of, wherever in memory they lie."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_sparse:
        # Before that, the same values may lie in any arrangement.
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def tensor_digest(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits of SHA-256 over type, shape and bits."""
    return _hexadecimal(f"{tensor.dtype}{_shape(tensor)}".encode() + bits(tensor))


def _shape(tensor: Tensor) -> str:
    """Return a tensor's shape, and what else tells its layout; a nested one's own shape has a number that no other has."""
    if not tensor.is_nested and tensor.layout in (torch.strided, torch.sparse_coo):
        return f"{tuple(tensor.shape)}"
    parts = [tuple(part.shape) for part in _strided_parts(tensor.detach())]
    return f"{tensor.layout}{parts}" if tensor.is_nested else f"{tensor.layout}{tuple(tensor.shape)}{parts}"


def _hexadecimal(content: bytes) -> str:
    # 64 bits are enough against chance, and a record holds one for each tensor and step.
    return hashlib.sha256(content).hexdigest()[:16]


def gradient_digest(gradient: Tensor | None) -> str:
    """Return the same of a gradient; ``none`` without one, and ``zero`` for one of zeros, dense or sparse."""
    if gradient is None:
        return "none"
    is_sparse = not gradient.is_nested and gradient.layout != torch.strided
    values = _strided_parts(gradient.detach())[-1] if is_sparse else gradient
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
        # A set's own order follows from hashes of texts, which Python salts in each process.
        yield prefix, joined({value_digest(inner): "" for inner in sorted(value, key=value_digest)})
    elif isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
        yield prefix, _hexadecimal(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif value is None or type(value) in PLAIN:
        # By its exact type: a subclass may hold more than it shows.
        yield prefix, repr(value)
    elif isinstance(value, type | FunctionType | BuiltinFunctionType):
        # pickle, too, knows these by their names alone.
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
        # Not the bytes of a pickle: they refer back to a part that came before, where an equal object may have two.
        made = value.__reduce_ex__(4)
    except Exception as error:
        raise ConfigError(
            f"There is no digest of a {type(value).__name__} ({error}). Batches and the state of optimizers are compared: let "
            "them hold tensors, arrays, plain values, or objects that can be pickled."
        ) from None
    # Items of lists and dictionaries come as iterators.
    return [made] if isinstance(made, str) else [list(part) if isinstance(part, Iterator) else part for part in made]


def state_digests(model: nn.Module, optimizer: Optimizer) -> Digests:
    """Return the digests of parameters and optimizer state, tensor by tensor."""
    # Not the optimizer's settings: learning rates are compared by themselves.
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

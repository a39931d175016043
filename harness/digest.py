"""Digests of tensors: equal if and only if the bits are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + bits(tensor)).hexdigest()[:16]


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
    else:
        yield prefix, repr(value)


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
    """Return one digest of all tensors and plain values in nested containers, such as a loaded batch."""
    return hashlib.sha256(repr(list(_flat("", value))).encode()).hexdigest()[:16]

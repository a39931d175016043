"""Digests of tensors: equal if and only if the bits are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def digest(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return SHA-256 over names, types, shapes and bits, in the order given, as 16 hexadecimal digits."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name}:{None if tensor is None else (tensor.dtype, tuple(tensor.shape))};".encode())
        if tensor is not None:
            total.update(bits(tensor))
    return total.hexdigest()[:16]


def bits(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; a sparse one's rows in the order of their indices."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return memoryview(bytes(bits(tensor.indices())) + bytes(bits(tensor.values())))
    flat = tensor.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def model_digests(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Return the digests of parameters, buffers and optimizer state."""
    return {
        "parameters": digest(model.named_parameters()),
        "buffers": digest(model.named_buffers()),
        "optimizer": digest(_flat("", optimizer.state_dict()["state"])),
    }


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, Tensor | None]]:
    """Yield the tensors in nested mappings and sequences, with numbers as tensors of one element."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _flat(f"{prefix}.{key}", inner)
    elif isinstance(value, bool | int | float):
        yield prefix, torch.tensor(value, dtype=torch.float64)

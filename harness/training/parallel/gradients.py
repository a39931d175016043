"""What is done to gradients between backward and the optimizer's step, sparse ones included."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def gradient_values(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return what each gradient holds, to read or to change in place: all of a dense one, the touched rows of a sparse one."""
    values = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            # A row that is there twice would count in a norm as two.
            parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad.values())
        else:
            values.append(parameter.grad)
    return values


def scale_(values: list[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients by one factor."""
    for value in values:
        value.mul_(factor)


def are_finite(values: list[Tensor]) -> bool:
    """Return True if no gradient holds NaN or infinity; an overflow of a tensor's sum counts as infinity."""
    if not values:
        return True
    # One number to wait for: whatever is added to NaN or infinity, the sum is not finite.
    return math.isfinite(float(torch.stack([value.sum() for value in values]).sum()))


def clip_(values: list[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint Euclidean norm is at most ``max_norm``; return the norm before (shape [])."""
    norm = nn.utils.get_total_norm(values)
    # The 1e-6 is that of torch.nn.utils.clip_grad_norm_, so that both clip alike.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale_(values, factor)
    return norm

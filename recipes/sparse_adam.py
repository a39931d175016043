"""One optimizer for a model in which some gradients are sparse and the others dense."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer, SparseAdam


class SparseDenseAdam(Optimizer):
    """Adam for parameters with dense gradients and SparseAdam for those with sparse ones, as one optimizer.

    One object, because a training loop, a schedule and a checkpoint each expect one. The two own nothing: their groups and
    their state are this optimizer's, group 0 dense and group 1 sparse. SparseAdam moves a row, and its averages, only in steps
    in which the row has a gradient; Adam would move it in all others too.

    Args:
        dense: Parameters with dense gradients.
        sparse: Parameters with sparse gradients, such as of ``nn.Embedding(sparse=True)``.
        lr: Learning rate of both.
        betas: Decay of the averages of both.
        eps: Added to both divisors.
    """

    def __init__(
        self, dense: Iterable[nn.Parameter], sparse: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self._parts: tuple[Optimizer, ...] = (
            Adam(dense, lr=lr, betas=betas, eps=eps),
            SparseAdam(sparse, lr=lr, betas=betas, eps=eps),
        )
        super().__init__([part.param_groups[0] for part in self._parts], {"lr": lr, "betas": betas, "eps": eps})

    def __getstate__(self) -> dict[str, Any]:
        # Optimizer names what a copy keeps; without the parts a copy could not step.
        return {**super().__getstate__(), "_parts": self._parts}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients; return what ``closure``, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Each time anew: load_state_dict puts other groups and another state in the place of those at construction.
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss

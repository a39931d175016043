"""Which types a computation narrows its numbers to of its own accord, beside what the run's precision says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.sparse import tensors_in


class Narrowing(TorchDispatchMode):
    """Notes the narrowest type that an operation within it returned for wider numbers: by ``x.float()``, or autocast.

    Attributes:
        narrowest: That type; None where nothing was narrowed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowest: torch.dtype | None = None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and look at what went in and what came out."""
        out = func(*args, **(kwargs or {}))
        given, returned = _widths([*args, *(kwargs or {}).values()]), _widths(out)
        if given and returned:
            width, dtype = min(returned.items())
            if width < max(given) and (self.narrowest is None or width < torch.finfo(self.narrowest).bits):
                self.narrowest = dtype
        return out


def _widths(value: Any) -> dict[int, torch.dtype]:
    return {torch.finfo(t.dtype).bits: t.dtype for t in tensors_in(value) if t.is_floating_point()}

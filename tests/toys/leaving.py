"""A recipe that ends its process with status 0, at a place that its settings name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from tests import toys


class Leaving(toys.Points):
    """Calls ``sys.exit(0)``, or ``os._exit(0)``, in ``dataset()`` or in its third step."""

    def __init__(self, place: str, how: str) -> None:
        super().__init__(dtype="float32")
        self.place, self.taken = place, 0
        self.leave: Callable[[int], Any] = {"exit": sys.exit, "os_exit": os._exit}[how]

    def dataset(self) -> Dataset[Any]:
        if self.place == "dataset":
            self.leave(0)
        return super().dataset()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.taken += 1
        if self.taken == 3:
            self.leave(0)
        return super().loss(model, batch)

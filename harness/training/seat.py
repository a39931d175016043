"""Where one process sits among those that train together."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seat:
    """Where this process sits among those that train together."""

    rank: int
    world_size: int
    device: torch.device

"""Checkpoints: written whole by rank 0, read by any number of ranks, or by bare torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.rundir import RunDir
from harness.state import random_states, set_random_states
from harness.trainer import Trainer


def save(trainer: Trainer, path: Path, step: int) -> None:
    """Write what training needs to go on after ``step`` steps; a reader finds the old checkpoint or the new one."""
    states: list[Any] = [None] * trainer.seat.world_size
    if trainer.seat.world_size > 1:
        dist.all_gather_object(states, random_states())
    else:
        states = [random_states()]
    if trainer.seat.rank != 0:
        return
    aside = path.with_name(f".{path.name}.aside")
    content = {
        "step": step,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict() if trainer.scheduler else None,
        "random": states,
    }
    torch.save(content, aside)
    aside.replace(path)


def load(trainer: Trainer, path: str) -> int:
    """Take over a checkpoint, by its path or its run's folder, and return the number of steps that it has behind it.

    Random streams go on where they were if the number of ranks is the same; otherwise they are seeded anew.

    Raises:
        ConfigError: There is no such checkpoint, or it is of another model.
    """
    file = RunDir(path).checkpoint if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise ConfigError(f"resume={path}: there is no checkpoint {file}.")
    content = torch.load(file, map_location=trainer.seat.device, weights_only=False)
    try:
        trainer.model.load_state_dict(content["model"])
    except RuntimeError as error:
        raise ConfigError(f"resume={path}: the checkpoint is of another model. {error}") from None
    trainer.optimizer.load_state_dict(content["optimizer"])
    if trainer.scheduler is not None and content["scheduler"] is not None:
        trainer.scheduler.load_state_dict(content["scheduler"])
    if len(content["random"]) == trainer.seat.world_size:
        set_random_states(content["random"][trainer.seat.rank])
    return int(content["step"])

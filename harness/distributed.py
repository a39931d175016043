"""A script's own view of the ranks: ``import harness.distributed as dist``. Importing this costs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.rank.group import ParallelEnv, get_rank, get_world_size, init_parallel_env, prepare_context

if TYPE_CHECKING:
    from harness.entrypoints.spawn import spawn
    from harness.training.parallel.ddp import DataParallel

__all__ = [
    "DataParallel",
    "ParallelEnv",
    "get_rank",
    "get_world_size",
    "init_parallel_env",
    "prepare_context",
    "spawn",
]


def __getattr__(name: str) -> Any:
    if name == "DataParallel":
        from harness.training.parallel.ddp import DataParallel

        return DataParallel
    if name == "spawn":
        from harness.entrypoints.spawn import spawn

        return spawn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

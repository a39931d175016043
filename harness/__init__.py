"""A training harness for data-parallel PyTorch.

The public names are loaded when they are first used, and importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.entrypoints.spawn import spawn
    from harness.errors import BackendUnavailable, ConfigError, HarnessError, NotComparable, RankFailed, RunTimeout
    from harness.rank.group import ParallelEnv, get_rank, get_world_size, init_parallel_env, prepare_context
    from harness.rank.scalars import log
    from harness.training.parallel.batchnorm import SyncBatchNorm
    from harness.training.parallel.ddp import DataParallel

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "ConfigError",
    "DataParallel",
    "HarnessError",
    "NotComparable",
    "ParallelEnv",
    "RankFailed",
    "RunTimeout",
    "SyncBatchNorm",
    "get_rank",
    "get_world_size",
    "init_parallel_env",
    "log",
    "prepare_context",
    "spawn",
]

_HOMES = {
    "harness.rank.group": ("ParallelEnv", "get_rank", "get_world_size", "init_parallel_env", "prepare_context"),
    "harness.rank.scalars": ("log",),
    "harness.errors": ("BackendUnavailable", "ConfigError", "HarnessError", "NotComparable", "RankFailed", "RunTimeout"),
    "harness.training.parallel.batchnorm": ("SyncBatchNorm",),
    "harness.training.parallel.ddp": ("DataParallel",),
    "harness.entrypoints.spawn": ("spawn",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Backends as a process with torch sees them: what can be used here, and joining a group with it."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def probe() -> dict[str, Any]:
    """Return what :class:`harness.run.placement.Machine` holds, as plain data; nothing is initialised by asking."""
    groups = available_groups()
    return {
        "torch": torch.__version__,
        "groups": groups,
        "devices": visible_devices(),
        "group_devices": {name: dist.Backend.backend_capability.get(name, []) for name in groups},
    }


def available_groups() -> list[str]:
    """Return the names of the process groups that this build, with its plugins, can make."""
    if not dist.is_available():
        return []
    built_in = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    # "fake" joins nobody: it is torch's own for tests.
    registered = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake", *built_in)]
    return [name for name, there in built_in.items() if there] + registered


def visible_devices() -> dict[str, int]:
    """Return how many devices of each accelerator type are visible."""
    kind = torch.accelerator.current_accelerator()
    counts = {"cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
    # A vendor's plugin to torch brings a type of device of its own, which only this tells.
    if kind is not None:
        counts.setdefault(kind.type, torch.accelerator.device_count())
    return {name: count for name, count in counts.items() if count}


# For a parent without a warm server: it asks a process of its own, and stays free of torch.
if __name__ == "__main__":
    json.dump(probe(), sys.stdout)

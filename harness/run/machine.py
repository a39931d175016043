"""What a sweep runs on, as facts that decide whether two sweeps can be compared. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.run.environment import usable_cores

PACKAGES = ("torch", "numpy", "hydra-core")


def machine_facts() -> dict[str, str]:
    """Return name -> value: cores that may be used, CPU, memory, system, versions, frequency governor."""
    facts = {
        "cores": str(usable_cores()),
        "cpu": _cpu(Path("/proc/cpuinfo")),
        "memory": _memory(Path("/proc/meminfo")),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "governor": _governor(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }
    return {name: value for name, value in facts.items() if value}


def _cpu(path: Path) -> str:
    line = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    # On ARM, Linux names no model here.
    return line.group(1).strip() if line else platform.processor() or platform.machine()


def _memory(path: Path) -> str:
    line = re.search(r"^MemTotal:\s*(\d+) kB", path.read_text(), re.MULTILINE) if path.exists() else None
    return f"{int(line.group(1)) / 2**20:.1f} GiB" if line else ""


def _version(name: str) -> str:
    try:
        # Of the installed package: to import torch for its version takes seconds.
        return version(name)
    except PackageNotFoundError:
        return ""


def _governor(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""

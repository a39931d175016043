"""Starting echo ranks under every launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.run.folder import RunDir
from harness.run.plan import RunPlan, Task
from harness.run.record import RunResult

ECHO = Path(__file__).with_name("echo.py")
STARTS = {
    "spawn": ("spawn", "forkserver"),
    "spawn-spawn": ("spawn", "spawn"),
    "spawn-fork": ("spawn", "fork"),
    "launch": ("launch", "forkserver"),
    "torchrun": ("torchrun", "forkserver"),
}


@dataclass
class Heard:
    """An observer that keeps what it hears."""

    output_lines: list[str] = field(default_factory=list)
    events: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    lines_before_end: int = 0

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        self.events.append((rank, event))

    def output(self, line: str) -> None:
        self.output_lines.append(line)


@dataclass
class Echoed:
    """What came of a run of echo ranks."""

    result: RunResult
    run: RunDir
    heard: Heard

    def told(self, name: str, rank: int) -> Any:
        """Return what a rank told."""
        return json.loads((self.run.path / f"{name}-{rank}").read_text())


def echo_plan(how: str, behaviour: Mapping[str, str], **settings: Any) -> RunPlan:
    """Return the plan of a run in which each rank behaves as told."""
    method, start_method = STARTS.get(how, (how, "forkserver"))
    task = Task(kind="script", path=str(ECHO), arguments=(json.dumps(dict(behaviour)),))
    values = {"nprocs": 1 if how == "inline" else 2, "cwd": str(Path.cwd()), "sys_path": tuple(map(os.path.abspath, sys.path))}
    return RunPlan(task, method=method, start_method=start_method, **{**values, **settings})


Echo = Callable[..., Echoed]

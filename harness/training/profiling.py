"""``profile=true``: what a rank does inside its steps, as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.run.folder import CLOCK_EVENT
from harness.training.trainer import Trainer

PROFILED_STEPS = 10
PARTS = ("accumulate", "reduced", "update")
"""Methods of a trainer that a step consists of, beside loading."""


class StepProfile:
    """Profiles the first steps after the warm-up, and writes the trace.

    Args:
        first: Number of steps to wait.
    """

    def __init__(self, trainer: Trainer, path: Path, first: int) -> None:
        self._path, self._first = path, first
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile: Any = profile(activities=activities)
        self._running = False
        for name in PARTS:
            # On this trainer, not on its class: another trainer in this process is left alone.
            setattr(trainer, name, self._annotated(name, getattr(trainer, name)))

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Mark what follows in the trace."""
        return record_function(name) if self._running else nullcontext()

    def after(self, taken: int, last: bool) -> None:
        """Begin or end, when so many steps were taken."""
        if self._running and (last or taken == self._first + PROFILED_STEPS):
            self._running = False
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
        elif taken == self._first and not last:
            self._profile.start()
            self._running = True
            # The trace has a clock of its own; this tells what CLOCK_MONOTONIC was.
            with record_function(f"{CLOCK_EVENT} {time.monotonic_ns()}"):
                pass

    def _annotated(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def annotated(*args: Any) -> Any:
            with self.part(name):
                return function(*args)

        return annotated

"""What the plugin's user sets besides a training: how ranks start, and what becomes of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.run.plan import START_METHODS
from harness.run.setting import MISSING, setting

MOST_SECONDS = 10**9
"""A life's time; a wait of more overflows what counts the time."""


@dataclass(frozen=True)
class LaunchSettings:
    """How and where ranks start, as typed."""

    method: str = setting("spawn", heading="How ranks start", path="launcher.name", schema=MISSING)
    start_method: str = setting(
        "forkserver", "of spawn: forkserver (a warm server), spawn, fork", path="launcher.start_method", choices=START_METHODS
    )
    timeout_s: float | None = setting(
        None,
        "seconds of silence after which ranks count as hung; null: wait for ever",
        path="launcher.timeout_s",
        # A sweep may run with nobody there to see it hang; spawn() and the launch command wait for ever.
        schema=600.0,
        above=0,
        at_most=MOST_SECONDS,
        or_null=", or {null}",
    )
    grace_s: float = setting(1.0, "seconds from SIGTERM to SIGKILL", path="launcher.grace_s", at_least=0, at_most=MOST_SECONDS)
    backend: str = setting("auto", path="backend.name", schema=MISSING)
    # Hydra takes [4,5] for a list, 4 for a number and '4,5' for a text.
    devices: Any = setting(
        None,
        "absolute ids with commas between, as in CUDA_VISIBLE_DEVICES; null: the first visible ones",
        path="backend.devices",
    )
    nprocs: int = setting(-1, "ranks; -1: every visible accelerator, else every core this process may use", at_most=4096)
    threads: Any = setting("auto", "of the math libraries per rank; auto: OMP_NUM_THREADS, else the cores shared out")


@dataclass(frozen=True)
class Report:
    """What shows the results."""

    reporters: Mapping[str, Any] = setting(dict, "name -> class (_target_) and its arguments; null leaves one out")


@dataclass(frozen=True)
class SweepSettings:
    """What is measured and shown of a sweep's jobs."""

    pairs: int = setting(
        0,
        "launches of each job for a claim of speed, where jobs do the same work; 4, 10, 20",
        heading="Proof",
        path="compare.pairs",
        at_least=0,
        words=" (one launch per job)",
        at_most=10**6,
    )
    aa: bool = setting(
        False,
        "with pairs: launch twice as often and hold each job against itself too, to see what can be told apart",
        path="compare.aa",
    )
    report: Any = setting(None, heading="Output", schema=Report)

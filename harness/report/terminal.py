"""What the terminal shows while a sweep runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.record import RunResult
from harness.sweep import Job


class Terminal:
    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def started(self, job: Job) -> None:
        print(f"job {job.plan.job}: {job.plan.method} {job.plan.nprocs}")

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        if event["event"] == "log":
            print(event["text"])

    def output(self, line: str) -> None:
        print(line, flush=True)

    def ended(self, job: Job, result: RunResult) -> None:
        print(f"job {job.plan.job}: {result.status} {result.message}", file=sys.stderr)

    def close(self) -> None:
        pass

"""What a script writer asks for, by ``spawn`` or on the launch command's line: checked, and turned into a RunPlan."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from harness.errors import WORDS, ConfigError, Problem, WrongSettings
from harness.launchers import registry
from harness.launchers.base import Launcher, Process
from harness.launchers.supervisor import Observer, Supervisor
from harness.run.environment import common_environment, usable_cores, wanted_threads
from harness.run.folder import RunDir
from harness.run.placement import Machine, Placement, place
from harness.run.plan import START_METHODS, RunPlan, Task
from harness.run.record import RunResult

_KIND_OF_OPTION = {"gpus": "cuda", "selected_gpus": "cuda", "xpus": "xpu"}


@dataclass(frozen=True)
class Request:
    """Settings as typed.

    Attributes:
        devices: Absolute ids with commas between; None for the first visible ones.
        option: Name of the option by which ``devices`` were given.
        method: ``spawn``, ``launch`` or ``torchrun``.
        door: Who asks: ``spawn`` or ``command``.
    """

    nprocs: int = -1
    backend: str = "auto"
    devices: str | None = None
    option: str = "gpus"
    start_method: str = "forkserver"
    timeout_s: float | None = None
    threads: int | str = "auto"
    method: str = "spawn"
    door: str = "spawn"

    @property
    def words(self) -> Mapping[str, str]:
        """Setting -> what was typed for it."""
        return {**WORDS[self.door], "devices": WORDS[self.door]["nprocs"].removesuffix("nprocs") + self.option}

    def plan(self, task: Task, sys_path: Sequence[str]) -> RunPlan:
        """Return the run's plan.

        Raises:
            ConfigError: Settings make no sense; all of them are named.
            BackendUnavailable: The backend cannot run here with that many ranks.
        """
        try:
            return self._plan(task, sys_path)
        except WrongSettings as error:
            error.words = self.words
            raise

    def _plan(self, task: Task, sys_path: Sequence[str]) -> RunPlan:
        problems = self._problems()
        if problems:
            raise ConfigError(*problems)
        placement = self._place()
        threads = wanted_threads(os.environ, self.threads, usable_cores(), placement.nprocs)
        return RunPlan(
            task=task,
            method=self.method,
            start_method=self.start_method,
            nprocs=placement.nprocs,
            backend=placement.backend,
            backend_reason=placement.reason,
            device=placement.device,
            devices=placement.devices,
            threads=threads,
            timeout_s=self.timeout_s,
            cwd=_current_folder(),
            sys_path=tuple(os.path.abspath(entry) for entry in sys_path),
            argv=tuple(sys.argv),
            door=self.door,
        )

    def _problems(self) -> list[Problem]:
        kind = _KIND_OF_OPTION.get(self.option) if self.devices is not None else None
        needed = {"cuda": "nccl", "xpu": "bkcl"}.get(kind or "")
        checks = [
            (
                _is_not_whole(self.nprocs),
                Problem("{nprocs}={count!r} must be a whole number, or -1 for all.", count=self.nprocs),
            ),
            (
                self.start_method not in START_METHODS,
                Problem(
                    "{start_method}={name} is unknown; use {known}.", name=self.start_method, known=", ".join(START_METHODS)
                ),
            ),
            (
                self.timeout_s is not None and (_is_not_a_number(self.timeout_s) or not float(self.timeout_s) > 0),
                Problem("{timeout_s}={seconds!r} must be a number of seconds above 0.", seconds=self.timeout_s),
            ),
            (
                self.threads != "auto" and (_is_not_whole(self.threads) or int(self.threads) < 1),
                Problem("{threads}={count!r} must be auto or at least 1.", count=self.threads),
            ),
            (
                needed is not None and self.backend in {"nccl", "bkcl"} - {needed},
                Problem(
                    "{devices}={ids} goes with {backend}={needed}, not with {backend}={name}.",
                    ids=self.devices,
                    needed=needed,
                    name=self.backend,
                ),
            ),
        ]
        return [sentence for wrong, sentence in checks if wrong]

    def _place(self) -> Placement:
        found = place(self.backend, self.nprocs, self.devices, usable_cores(), os.environ, machine)
        kind = _KIND_OF_OPTION.get(self.option) if self.devices is not None else None
        if kind is not None and found.devices and found.device != kind:
            said = "{devices}={ids} names devices of type {kind}, but {backend}={name} is for {device}."
            raise ConfigError(Problem(said, ids=self.devices, kind=kind, name=found.backend, device=found.device))
        return found


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("The current folder has been removed: ranks cannot run there. Change to another.") from None


def _is_not_a_number(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int | float)


def _is_not_whole(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int)


@functools.cache
def machine() -> Machine:
    """Return what a process with torch sees of this machine; asked once."""
    return Machine(**registry.probe())


def summary(plan: RunPlan) -> str:
    """Return one line on where a run's ranks run, and why there."""
    where = f"{plan.device} {','.join(plan.devices)}" if plan.devices else plan.device
    ranks = "1 rank" if plan.nprocs == 1 else f"{plan.nprocs} ranks"
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    return f"{ranks} on {where}, backend {plan.backend} ({plan.backend_reason}), {threads} each, started by {plan.method}"


class Console:
    """Shows rank 0's output as it comes, and the other ranks' warnings."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Show a log record that a rank has forwarded."""
        if event["event"] == "log":
            print(f"[rank {rank}] {event['level']}: {event['text']}", file=sys.stderr, flush=True)

    def output(self, line: str) -> None:
        """Show a line of rank 0."""
        stream = self._output or sys.stdout
        try:
            print(line, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


class Attempt:
    """One run of ranks from its start to its result, by the one supervisor."""

    def __init__(self, run: RunDir, plan: RunPlan, launcher: Launcher | None = None, observer: Observer | None = None) -> None:
        self.run = run
        self.plan = plan
        self.processes: Sequence[Process] = ()
        self._launcher = launcher or registry.launcher(plan.method)
        self._supervisor = Supervisor(run, plan, observer, time.monotonic())
        plan.write(run)

    def watch(self, timeout: float | None = None) -> RunResult | None:
        """Start the ranks if they do not run yet, and see them to their end; None if ``timeout`` seconds pass before."""
        return self._supervisor.watch(self._start, timeout)

    def stop(self) -> None:
        """End all ranks."""
        self._supervisor.stop()

    def _start(self) -> Sequence[Process]:
        self.processes = self._launcher.start(self.run, self.plan, self._environment())
        return self.processes

    def _environment(self) -> dict[str, str]:
        return common_environment(os.environ, self.plan, self.run.path)


def details(result: RunResult, run: RunDir) -> str:
    """Return what the rank that fell first left behind: its traceback, the stacks of all, or its last lines of output."""
    if result.failed_rank is None:
        return ""
    failed = next((rank for rank in result.ranks if rank.rank == result.failed_rank), None)
    if failed is not None and failed.failure is not None:
        return failed.failure.traceback.rstrip()
    if "hung" in result.marks and run.stacks.exists():
        return run.stacks.read_text(errors="replace").rstrip()
    return last_lines(run.log(result.failed_rank))


def last_lines(path: Path, count: int = 20) -> str:
    """Return the end of a text file, empty where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 200 * count))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])

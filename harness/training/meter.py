"""What else the machine did while a rank worked: what the kernel counts of this process and of its surroundings."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Reading:
    """Counters since the process, or the machine, started. What the system does not count is None.

    Attributes:
        t: CLOCK_MONOTONIC, in seconds.
        run_delay_s: How long this rank's main thread was ready and did not get a core.
        pressure_s: How long some task of the machine waited for a core (``/proc/pressure/cpu``).
        cpu_s: CPU time of this rank, all threads, and of its child processes, such as data workers.
        busy_s: How long the cores that this rank may use were not idle, added up (``/proc/stat``).
        throttled: How often the control group held its processes back.
        major_faults: Page faults that read a disk.
        involuntary_switches: How often the kernel took the core away.
    """

    t: float
    run_delay_s: float | None
    pressure_s: float | None
    cpu_s: float
    busy_s: float | None
    throttled: int
    major_faults: int
    involuntary_switches: int


class Meter:
    """Reads the counters; keeps the one that is read at every step open."""

    def __enter__(self) -> Meter:
        try:
            self._schedstat = os.open("/proc/self/schedstat", os.O_RDONLY)
        except OSError:
            # Not Linux, or a kernel that does not count it.
            self._schedstat = -1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._schedstat >= 0:
            os.close(self._schedstat)

    def run_delay_s(self) -> float | None:
        """Return the second field of ``/proc/self/schedstat``, in seconds."""
        if self._schedstat < 0:
            return None
        # /proc writes its text anew whenever it is read from the start: no seek, and no file opened in a step.
        return int(os.pread(self._schedstat, 128, 0).split()[1]) / 1e9

    def read(self) -> Reading:
        """Return all counters."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Reading(
            t=time.monotonic(),
            run_delay_s=self.run_delay_s(),
            pressure_s=_pressure_s(),
            cpu_s=usage.ru_utime + usage.ru_stime + _children_s(),
            busy_s=_busy_s(),
            throttled=_throttled(),
            major_faults=usage.ru_majflt,
            involuntary_switches=usage.ru_nivcsw,
        )


def _children_s(processes: Path = Path("/proc")) -> float:
    """Return the CPU time of this process's children: of those that have ended, and of those that are alive."""
    # The kernel adds a child here once it is waited for, and data workers live as long as an epoch.
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = 0.0
    # Thread by thread: the kernel lists a child under the thread that forked it.
    for children in (processes / "self" / "task").glob("*/children"):
        for pid in _read(children).split():
            # The name before the last parenthesis may hold spaces; after it the 3rd field comes first.
            fields = _read(processes / pid / "stat").rpartition(")")[2].split()
            alive += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return ended.ru_utime + ended.ru_stime + alive


def _read(path: Path) -> str:
    """Return the text of a file; empty where there is none, or no longer."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _pressure_s(path: Path = Path("/proc/pressure/cpu")) -> float | None:
    try:
        line_of_some = path.read_text().splitlines()[0]
    except OSError:
        return None
    # In microseconds.
    return int(line_of_some.rpartition("total=")[2]) / 1e6


def _busy_s(path: Path = Path("/proc/stat")) -> float | None:
    try:
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        total, *cores = (line.split() for line in path.read_text().splitlines() if line.startswith("cpu"))
        allowed = [core for core in cores if core[0] in usable]
        # The total is rounded once, and not core by core.
        idle = sum(int(ticks) for line in ([total] if len(allowed) == len(cores) else allowed) for ticks in _idle(line))
    except (AttributeError, OSError, ValueError):
        return None
    # Not the fields that say who was busy: ticks sample those, and miss threads that run for less than a tick.
    return len(allowed) * time.monotonic() - idle / os.sysconf("SC_CLK_TCK")


def _idle(line: Sequence[str]) -> tuple[str, str]:
    """Return the two fields of a line of ``/proc/stat`` that count idleness, of which one is spent waiting for a disk."""
    nothing_to_do, waiting_for_disk = line[4:6]
    return nothing_to_do, waiting_for_disk


def _throttled(root: Path = Path("/sys/fs/cgroup")) -> int:
    # Version 2 of control groups, then version 1.
    for path in (root / "cpu.stat", root / "cpu" / "cpu.stat"):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(counts.get("nr_throttled", 0))
    return 0

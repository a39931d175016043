"""What a task can know of the rank that it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir
from harness.run.plan import RunPlan
from harness.run.recorder import Recorder


@dataclass(frozen=True)
class Rank:
    """One rank of one run."""

    run: RunDir
    plan: RunPlan
    who: RankEnvironment
    record: Recorder


# For the process and not a ContextVar, which threads that the task starts would find empty.
_current: list[Rank] = []


@contextmanager
def inhabited(rank: Rank) -> Iterator[None]:
    """Make ``rank`` the one that :func:`current` returns; this process may outlive it."""
    _current[:] = [rank]
    try:
        yield
    finally:
        _current.clear()


def current_or_none() -> Rank | None:
    """Return the rank that this process is; None where it was not started as one."""
    return _current[0] if _current else None


def recorder() -> Recorder | None:
    """Return what this rank records by; None in a process that was not started as a rank."""
    return _current[0].record if _current else None


def current() -> Rank:
    """Return the rank that this process is.

    Raises:
        RuntimeError: This process was not started as a rank.
    """
    if not _current:
        raise RuntimeError("this process is no rank: start it by run.py, or by python -m harness.rank RUN_DIR")
    return _current[0]

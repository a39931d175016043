"""Forking a process that has threads, as a rank with gloo has."""

from __future__ import annotations

import threading
import time
from pathlib import Path

MOST_LOOKS = 100
"""So often, each time for a millisecond: a thread that still runs then is at work of its own."""


def let_threads_rest(tasks: Path = Path("/proc/self/task")) -> None:
    """Wait until every other thread of this process sleeps, having had the interpreter's lock if it wanted it (Linux).

    Before a fork: gloo's threads let go of Python's objects after each collective, and a child that is forked while one of them
    enters Python never comes out of its fork (CPython 3.11: ``_PyThreadState_DeleteExcept`` waits for a lock that nobody has).
    """
    others = [task for task in tasks.glob("*") if int(task.name) != threading.get_native_id()]
    for _ in range(MOST_LOOKS):
        if not others:
            break
        # Without the lock, so that who waits for it has it.
        time.sleep(0.001)
        others = [task for task in others if _is_running(task)]


def _is_running(task: Path) -> bool:
    try:
        # The thread's name, in parentheses, may hold spaces and parentheses itself.
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False

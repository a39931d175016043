"""Looking at processes from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600.0
"""How long a test waits for what is no matter of time: only a hang takes as long, even on a machine ten times slower."""


def scaled(seconds: float) -> float:
    """Return a time that is itself what is tested, longer by as much as this machine starts programs more slowly now."""
    begin = time.monotonic()
    for _ in range(3):
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
    return seconds * max(1.0, (time.monotonic() - begin) / 0.09)


def descendants(root: int) -> set[int]:
    """Return the ids of all living processes below ``root``."""
    found: set[int] = set()
    new = {root}
    while new:
        new = {child for parent in new for child in _children(parent) if alive(child)} - found
        found |= new
    return found


def _children(pid: int) -> set[int]:
    """Return what a process has started and not yet waited for, by whichever thread."""
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            children |= set(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return children


def command_line(pid: int) -> str:
    """Return the words with which a process was started; nothing of one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def printing_into(folder: Path) -> set[int]:
    """Return the processes whose standard output is a file in ``folder``, whoever their parent is by now."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "fd" / "1").readlink().is_relative_to(folder):
                found.add(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
    """Return True as soon as ``condition`` holds, False if it never does within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Return True while a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

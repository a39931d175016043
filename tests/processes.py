"""Looking at processes from outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def descendants(root: int) -> dict[int, str]:
    """Return the command lines of all living processes below ``root``, by process id."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            commands[int(entry.name)] = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state != "Z":
            parents[int(entry.name)] = int(parent)
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: commands[pid] for pid in found - {root}}


def printing_into(folder: Path) -> set[int]:
    """Return the processes whose standard output is a file in ``folder``, whoever their parent is by now."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "fd" / "1").readlink().is_relative_to(folder):
                found.add(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
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

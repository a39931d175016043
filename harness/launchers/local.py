"""Processes on this machine: each the leader of a process group, so that its own children are reached too."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from harness.run.environment import PARENT

if TYPE_CHECKING:
    from concurrent.futures import Executor


class LocalProcess:
    """What signals reach by the number of a process, whoever is its parent."""

    pid: int
    rank: int | None
    server: int | None = None

    def signal(self, number: int) -> None:
        """Send a signal to it and its children."""
        signal_group(self.pid, number)

    def kill(self) -> None:
        """End it and its children at once."""
        signal_group(self.pid, signal.SIGKILL)

    def ask_for_stacks(self, pid: int) -> None:
        """Have a rank write where it stands: this process, or a child of it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


class OwnProcess(LocalProcess):
    """A child of this process, in a session of its own: a Ctrl-C on the terminal reaches the parent alone."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        log: Path,
        rank: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        # Appended to: ranks share this log until each has one of its own.
        with log.open("ab") as output:
            self._child = self._open(command, environment, cwd, output, pass_fds)
        self.pid = self._child.pid
        # The number is this child's until poll() has reaped it: the descriptor cannot be another's.
        self._pidfd = pidfd_of(self.pid)

    @staticmethod
    def _open(
        command: Sequence[str], environment: Mapping[str, str], cwd: str, output: IO[bytes], pass_fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env={**environment, PARENT: str(os.getpid())},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
            )

        # The main thread, by its number on Linux: it lasts as long as the process.
        if threading.get_native_id() == os.getpid():
            return start()
        # The kernel has a child end with the thread that forked it, and this thread may end before its ranks.
        return _lasting_thread().submit(start).result()

    def poll(self) -> int | None:
        """Return the exit code, after whatever is left of the process group has been ended."""
        if self._child.returncode is None and has_ended(self.pid):
            # Before it is waited for: afterwards another process may be given its number.
            self.kill()
        code = self._child.poll()
        if code is not None and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return code

    def fileno(self) -> int:
        """Return the descriptor that becomes readable at its end."""
        return self._pidfd


_STARTING = "harness-starts"


@functools.cache
def _lasting_thread() -> Executor:
    """Return what runs a function in a thread that lasts as long as this process."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, _STARTING)


def idle_threads() -> int:
    """Return how many threads of this process wait for something to start: they hold nothing that a fork would miss."""
    return sum(thread.name.startswith(_STARTING) for thread in threading.enumerate())


# A fork copies no other thread: a copy of the executor would never run anything.
os.register_at_fork(after_in_child=_lasting_thread.cache_clear)


def pidfd_of(pid: int) -> int:
    """Return a descriptor that becomes readable when a process has ended; -1 where the system has none, or none left."""
    try:
        return os.pidfd_open(pid)
    # AttributeError outside of Linux; OSError from a kernel before 5.3, and where no descriptor is left.
    except (AttributeError, OSError):
        return -1


def has_ended(pid: int) -> bool:
    """Return True for a child that has ended; it stays a zombie, so that nobody else is given its group's number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group; one that is gone is left in peace."""
    # PermissionError: what is left of it has become another user's, by a set-user-id program.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)

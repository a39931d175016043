"""What every launcher offers, and the process of one rank as the supervisor sees it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from harness.run.environment import PARENT, RankEnvironment
from harness.run.folder import RunDir
from harness.run.plan import RunPlan

if TYPE_CHECKING:
    from concurrent.futures import Executor


class Process(Protocol):
    """A started process: the leader of a process group, so that its own children are reached too.

    Attributes:
        pid: Its id, and its group's.
        rank: Which rank it is; None for an agent that starts the ranks itself.
        server: Exit code of the warm server whose death ended it; None where it runs, or ended otherwise.
    """

    pid: int
    rank: int | None
    server: int | None

    def poll(self) -> int | None:
        """Return its exit code, negative for the signal that ended it; None while it runs. Never blocks."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when it has ended; -1 where the system has none, or none left."""


class Launcher(Protocol):
    """A way to start ranks. One may serve many runs, one after another."""

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Start the ranks of ``plan``.

        Args:
            run: Holds ``plan.json``.
            environment: What all ranks have in common, whole.
        """

    def close(self) -> None:
        """End what the launcher keeps alive between runs."""


class OwnProcess:
    """A child of this process, in a session of its own: a Ctrl-C on the terminal reaches the parent alone."""

    server: int | None = None

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
        with log.open("ab") as output:
            self._child = self._open(command, environment, cwd, output, pass_fds)
        self.pid = self._child.pid
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

        if threading.get_native_id() == os.getpid():
            return start()
        # The kernel has a child end with the thread that forked it, and this thread may end before its ranks.
        return _lasting_thread().submit(start).result()

    def poll(self) -> int | None:
        """Return the exit code, after whatever is left of the process group has been ended."""
        if self._child.returncode is None and has_ended(self.pid):
            kill_group(self.pid, signal.SIGKILL)
        code = self._child.poll()
        if code is not None and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return code

    def fileno(self) -> int:
        """Return the descriptor that becomes readable at its end."""
        return self._pidfd


@functools.cache
def _lasting_thread() -> Executor:
    """Return what runs a function in a thread that lasts as long as this process."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, "harness-starts")


os.register_at_fork(after_in_child=_lasting_thread.cache_clear)


def pidfd_of(pid: int) -> int:
    """Return a descriptor that becomes readable when a process has ended; -1 where the system has none, or none left."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def has_ended(pid: int) -> bool:
    """Return True for a child that has ended; it stays a zombie, so that nobody else is given its group's number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def start_each(starts: Iterable[Callable[[], Process]]) -> list[Process]:
    """Start processes one after another; if one cannot be started, none is left."""
    started: list[Process] = []
    try:
        for start in starts:
            started.append(start())
    except BaseException:
        for process in started:
            kill_group(process.pid, signal.SIGKILL)
            while process.poll() is None:
                time.sleep(0.005)
        raise
    return started


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours in a fresh interpreter, in which files of the cwd hide no module.

    Flags of this interpreter (``-O``, ``-W``, ``-X``) are that one's too, as ``multiprocessing`` has it.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", module, *arguments]


def rank_environment(environment: Mapping[str, str], rank: int, nprocs: int) -> dict[str, str]:
    """Return the environment of one rank of a run on this machine."""
    return dict(environment) | RankEnvironment(rank, rank, nprocs, nprocs).variables()


def kill_group(pid: int, number: int) -> None:
    """Send a signal to a process group; one that is gone is left in peace."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)

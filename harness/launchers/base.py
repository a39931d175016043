"""What every launcher offers, and the process of one rank as the supervisor sees it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir
from harness.run.plan import RunPlan


class Process(Protocol):
    """A started process, on this machine or elsewhere.

    Attributes:
        pid: Its number where it runs; the supervisor makes nothing of it.
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

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it has started; nothing happens where it has ended."""

    def kill(self) -> None:
        """End it and what it has started, at once."""

    def ask_for_stacks(self, pid: int) -> None:
        """Have a rank write its stacks: this process, or one that it started, by the number that the rank recorded."""


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


class WarmLauncher(Launcher, Protocol):
    """A launcher of which a server outlives its runs, as its traits say."""

    @property
    def is_warm(self) -> bool:
        """True where the server has been started."""

    def warm(self) -> Any:
        """Return the server, which imports torch meanwhile; its ``probe()`` tells what it sees of this machine."""


def start_each(starts: Iterable[Callable[[], Process]]) -> list[Process]:
    """Start processes one after another; if one cannot be started, none is left."""
    started: list[Process] = []
    try:
        for start in starts:
            started.append(start())
    # A Ctrl-C between two starts as well: what is left would wait for ranks that never come.
    except BaseException:
        for process in started:
            process.kill()
            # To the end, as nobody asks for it later: it would stay a zombie.
            while process.poll() is None:
                time.sleep(0.005)
        raise
    return started


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours in a fresh interpreter, in which files of the cwd hide no module.

    Flags of this interpreter (``-O``, ``-W``, ``-X``) are that one's too, as ``multiprocessing`` has it.
    """
    # Private, and what multiprocessing itself starts its children with; no public function puts the flags together.
    # Held by tests/launchers/test_private_behaviour.py, as whatever else is private of Python and torch.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", module, *arguments]


def rank_environment(environment: Mapping[str, str], rank: int, nprocs: int) -> dict[str, str]:
    """Return the environment of one rank of a run on this machine."""
    return dict(environment) | RankEnvironment(rank, rank, nprocs, nprocs).variables()

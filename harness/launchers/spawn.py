"""``spawn``: ranks forked from a warm server, or by ``multiprocessing``'s spawn or fork."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from harness.environ import PARENT, THREAD_VARIABLES, without_stale
from harness.errors import HarnessError
from harness.launchers.base import Process, import_path, kill_group, rank_environment
from harness.launchers.launch import LaunchLauncher
from harness.plan import RunPlan
from harness.rundir import RunDir


class WarmServer:
    """The parent's end of :mod:`harness.launchers.server`; started without waiting, so that it imports meanwhile."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings or {})
        self.exit_codes: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        self._buffer = b""
        self._ready = False
        self._log = tempfile.TemporaryFile()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "harness.launchers.server", str(theirs.fileno())],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        env = without_stale(os.environ) | self.settings
        # Threads made at import would not survive the fork; every rank sets its own count afterwards.
        env |= {name: "1" for name in THREAD_VARIABLES}
        env.setdefault("PYTHONHASHSEED", "0")
        return env | {"PYTHONPATH": import_path(sys.path)}

    def start(self, requests: Sequence[Mapping[str, Any]]) -> list[int]:
        """Fork a rank for each request and return their process ids."""
        self._wait_until_ready()
        return list(self._ask({"start": list(requests)})["pids"])

    def probe(self) -> dict[str, Any]:
        """Return what :func:`harness.backend.probe` sees."""
        self._wait_until_ready()
        return dict(self._ask({"probe": True})["probe"])

    def fileno(self) -> int:
        """Return the descriptor on which exits are heard."""
        return self._channel.fileno()

    def hear(self, timeout_s: float | None = 0.0) -> bool:
        """Take in what the server says; False if it said nothing within ``timeout_s``.

        Raises:
            HarnessError: The server has died.
        """
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return False
        received = self._channel.recv(1 << 16)
        if not received:
            raise HarnessError(f"the process that ranks are forked from has died (status {self._child.wait()}):\n{self._tail()}")
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for answer in map(json.loads, lines):
            if "exit" in answer:
                self.exit_codes[answer["exit"][0]] = answer["exit"][1]
            else:
                self._answers.append(answer)
        return True

    def close(self) -> None:
        """End the server and all that it started."""
        self._channel.close()
        try:
            self._child.wait(timeout=0.2 if not self._ready else 5)
        except subprocess.TimeoutExpired:
            kill_group(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._log.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        return self._next_answer()

    def _next_answer(self) -> dict[str, Any]:
        while not self._answers:
            self.hear(None)
        return self._answers.pop(0)

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        _require_one_thread(self._next_answer()["ready"])
        self._ready = True

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]


class ServedProcess:
    """A rank that the warm server forked."""

    def __init__(self, server: WarmServer, pid: int, rank: int) -> None:
        self.pid = pid
        self.rank: int | None = rank
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code that the server has reported."""
        while self._server.hear():
            pass
        return self._server.exit_codes.get(self.pid)

    def fileno(self) -> int:
        """Return the server's descriptor."""
        return self._server.fileno()


class ForkedProcess:
    """A rank forked from this process itself."""

    def __init__(self, run: RunDir, environment: Mapping[str, str], cwd: str, rank: int) -> None:
        arguments = (str(run.path), dict(environment), cwd, os.getpid())
        self._child = multiprocessing.get_context("fork").Process(target=_become, args=arguments, name=f"rank-{rank}")
        self.rank: int | None = rank
        self._child.start()
        self.pid = int(self._child.pid or 0)

    def poll(self) -> int | None:
        """Return its exit code."""
        code = self._child.exitcode
        if code is not None:
            kill_group(self.pid, signal.SIGKILL)
        return code

    def fileno(self) -> int:
        """Return multiprocessing's sentinel."""
        return int(self._child.sentinel)


def _become(path: str, environment: Mapping[str, str], cwd: str, parent: int) -> None:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment, **{PARENT: str(parent)})
        os.chdir(cwd)
        from harness.rank import main

        code = main(path, forked=True)
    finally:
        os._exit(code)


class SpawnLauncher:
    """Forks ranks from one warm server, which is started once and serves every run after it."""

    def __init__(self) -> None:
        self._server: WarmServer | None = None

    @property
    def is_warm(self) -> bool:
        """True where a server has been started."""
        return self._server is not None

    def warm(self, settings: Mapping[str, str] | None = None) -> WarmServer:
        """Return a server whose modules saw ``settings`` in their environment when they were imported."""
        wanted = dict(settings or {})
        if self._server is not None and self._server.settings != wanted:
            self.close()
        if self._server is None:
            self._server = WarmServer(wanted)
        return self._server

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Start the ranks by the plan's start method; ``spawn`` means fresh interpreters, as ``launch`` makes them."""
        if plan.start_method == "spawn":
            return LaunchLauncher().start(run, plan, environment)
        environments = [rank_environment(environment, rank, plan.nprocs) for rank in range(plan.nprocs)]
        if plan.start_method == "fork":
            _require_one_thread(threading.active_count())
            return [ForkedProcess(run, env, plan.cwd, rank) for rank, env in enumerate(environments)]
        server = self.warm(plan.settings)
        pids = server.start([{"run": str(run.path), "cwd": plan.cwd, "env": env} for env in environments])
        return [ServedProcess(server, pid, rank) for rank, pid in enumerate(pids)]

    def close(self) -> None:
        """End the warm server."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _require_one_thread(threads: int) -> None:
    if threads != 1:
        raise HarnessError(
            f"ranks cannot be forked from a process of {threads} threads, because a fork copies only one. "
            "Use launcher.start_method=spawn or launcher=launch."
        )

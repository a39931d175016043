"""``spawn``: ranks forked from a warm server, or by ``multiprocessing``'s spawn or fork."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from harness.errors import HarnessError
from harness.launchers.base import Process, module_command, rank_environment, start_each
from harness.launchers.launch import LaunchLauncher
from harness.launchers.local import LocalProcess, has_ended, idle_threads, signal_group
from harness.launchers.signals import ENDING, raise_if_interrupted
from harness.run.environment import PARENT, THREAD_VARIABLES, import_path, without_stale
from harness.run.folder import RunDir
from harness.run.plan import RunPlan


def _above_standard(end: socket.socket) -> socket.socket:
    """Return the socket on a descriptor above 2: lower ones, free where a parent has closed them, become a child's streams."""
    if end.fileno() > 2:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


class WarmServer:
    """The parent's end of :mod:`harness.launchers.server`; started without waiting, so that it imports meanwhile."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings or {})
        self.exit_codes: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        self._buffer = b""
        self._ready = False
        self.exit_code: int | None = None
        # Threads of this process may each have a run whose ranks come from here.
        self._lock = threading.RLock()
        # No pipe: nobody reads what the server prints, and one that is full would block it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._channel, servers_end = map(_above_standard, socket.socketpair())
        with servers_end:
            self._child = subprocess.Popen(
                module_command("harness.launchers.server", str(servers_end.fileno()), str(os.getpid())),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[servers_end.fileno()],
                start_new_session=True,
            )
        _servers.add(self)

    @property
    def is_dead(self) -> bool:
        """True once it has been found dead."""
        return self.exit_code is not None

    def _environment(self) -> dict[str, str]:
        env = without_stale(os.environ) | self.settings
        # Threads made at import would not survive the fork; every rank sets its own count afterwards.
        env |= dict.fromkeys(THREAD_VARIABLES, "1")
        if env.get("PYTHONHASHSEED", "random") == "random":
            env["PYTHONHASHSEED"] = "0"
        return env | {"PYTHONPATH": import_path(env)}

    def start(self, requests: Sequence[Mapping[str, Any]]) -> list[int]:
        """Fork a rank for each request and return their process ids."""
        with self._lock:
            self._wait_until_ready()
            return list(self._ask({"start": list(requests)})["pids"])

    def probe(self) -> dict[str, Any]:
        """Return what :func:`harness.rank.backend.probe` sees."""
        with self._lock:
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
        with self._lock:
            return self._hear(timeout_s)

    def _hear(self, timeout_s: float | None) -> bool:
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return False
        try:
            received = self._channel.recv(1 << 16)
        # So ends a socket whose other side has died with a request unread.
        except ConnectionResetError:
            received = b""
        if not received:
            self.exit_code = self._child.wait()
            raise HarnessError(f"the process that ranks are forked from has died (status {self.exit_code}):\n{self._tail()}")
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for answer in map(json.loads, lines):
            if "exit" in answer:
                self.exit_codes[answer["exit"][0]] = answer["exit"][1]
            else:
                self._answers.append(answer)
        return True

    def close(self) -> None:
        """End the server and all that it started."""
        # A copy of this process made by fork may hold the socket open.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        try:
            # One that is not ready has no ranks, and does not listen.
            self._child.wait(timeout=5 if self._ready else 0)
        except subprocess.TimeoutExpired:
            signal_group(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._log.close()

    def part(self) -> None:
        """Close the socket alone, in a copy of this process made by fork: the server is the other's."""
        self._channel.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        # A server that has died tells by the end of its stream.
        with contextlib.suppress(BrokenPipeError):
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        return self._next_answer()

    def _next_answer(self) -> dict[str, Any]:
        while not self._answers:
            raise_if_interrupted()
            # For a moment at a time: the handler of a signal only takes note of it, and Python goes back to the wait.
            self.hear(0.1)
        return self._answers.pop(0)

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        # Counted after its imports: a library may have started a thread, whose locks a fork would copy as they are.
        _require_one_thread(self._next_answer()["ready"])
        self._ready = True

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]


_servers: weakref.WeakSet[WarmServer] = weakref.WeakSet()


def _part_from_servers() -> None:
    for server in _servers:
        server.part()
    _servers.clear()


# While a fork holds the socket open, its stream has no end that would tell the server of the parent's.
os.register_at_fork(after_in_child=_part_from_servers)


class ServedProcess(LocalProcess):
    """A rank that the warm server forked."""

    def __init__(self, server: WarmServer, pid: int, rank: int) -> None:
        self.pid = pid
        self.rank = rank
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code that the server has reported; the server's own death ends its ranks by SIGKILL."""
        if self._code is None:
            with contextlib.suppress(HarnessError):
                while not self._server.is_dead and self._server.hear():
                    pass
            # Taken out, because another rank may be given the same id later.
            self._code = self._server.exit_codes.pop(self.pid, None)
            if self._code is None and self._server.is_dead:
                # Ranks die with the server, by the kernel's signal.
                self._code, self.server = -signal.SIGKILL, self._server.exit_code
        return self._code

    def fileno(self) -> int:
        """Return the server's descriptor."""
        return self._server.fileno()


class ForkedProcess(LocalProcess):
    """A rank forked from this process itself."""

    def __init__(self, run: RunDir, environment: Mapping[str, str], rank: int) -> None:
        arguments = (str(run.path), dict(environment), os.getpid())
        self._child = multiprocessing.get_context("fork").Process(target=_become, args=arguments, name=f"rank-{rank}")
        self.rank = rank
        self._code: int | None = None
        # Until it has let go of this process's handlers, a signal to the rank would be taken for one to this process.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self._child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.pid = int(self._child.pid or 0)

    def poll(self) -> int | None:
        """Return its exit code."""
        if self._code is None and has_ended(self.pid):
            # While it is a zombie: once it is reaped, another process may be given its number.
            self.kill()
            self._child.join()
            self._code = self._child.exitcode
            self._child.close()
        return self._code

    def fileno(self) -> int:
        """Return multiprocessing's sentinel."""
        return int(self._child.sentinel) if self._code is None else -1


def _become(path: str, environment: Mapping[str, str], parent: int) -> None:
    try:
        os.setsid()
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        # Only now: a signal that has waited meets the default, which ends the rank, and no handler of the parent's.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        os.environ.clear()
        os.environ.update(environment, **{PARENT: str(parent)})
        from harness.rank.process import main

        main(path, forked=True)
    finally:
        # Never back into the caller's code, of which this is a copy.
        os._exit(1)


class SpawnLauncher:
    """Forks ranks from one warm server, which is started once and serves every run after it."""

    def __init__(self) -> None:
        self._server: WarmServer | None = None
        self._lock = threading.RLock()

    @property
    def is_warm(self) -> bool:
        """True where a server has been started."""
        return self._server is not None

    def warm(self, settings: Mapping[str, str] | None = None) -> WarmServer:
        """Return a server whose modules saw ``settings`` in their environment when they were imported."""
        wanted = dict(settings or {})
        with self._lock:
            if self._server is not None and (self._has_died(self._server) or self._server.settings != wanted):
                self.close()
            if self._server is None:
                self._server = WarmServer(wanted)
            return self._server

    @staticmethod
    def _has_died(server: WarmServer) -> bool:
        """Return True for a server that somebody has ended since it was last heard of."""
        with contextlib.suppress(HarnessError):
            while not server.is_dead and server.hear():
                pass
        return server.is_dead

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Start the ranks by the plan's start method; ``spawn`` means fresh interpreters, as ``launch`` makes them."""
        if plan.start_method == "spawn":
            return LaunchLauncher().start(run, plan, environment)
        environments = [rank_environment(environment, rank, plan.nprocs) for rank in range(plan.nprocs)]
        if plan.start_method == "fork":
            _require_one_thread(threading.active_count() - idle_threads())
            return start_each(partial(ForkedProcess, run, env, rank) for rank, env in enumerate(environments))
        server = self.warm(plan.settings)
        pids = server.start([{"run": str(run.path), "env": env} for env in environments])
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
            "Use start_method=spawn (in a configuration launcher.start_method=spawn, or launcher=launch)."
        )

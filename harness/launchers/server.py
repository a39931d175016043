"""The warm server: a process that has torch imported once and forks every rank of every run from itself.

``python -m harness.launchers.server SOCKET_FD PARENT_PID``. It speaks JSON lines on the socket that it inherits. It reads
``{"start": [{"run": ..., "env": {...}}, ...]}`` and answers ``{"pids": [...]}``; ``{"probe": true}`` and answers
``{"probe": {...}}``; by itself it says ``{"exit": [pid, code]}`` for every rank that ends. At the end of the stream, and of its
parent, whose socket a child of that one may hold open, it ends its ranks and itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

from harness.launchers.local import pidfd_of, signal_group
from harness.rank.importing import uncollected
from harness.rank.lifetime import die_with_parent, outlive_parent
from harness.run.environment import PARENT

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "hydra.core.utils",
    "threadpoolctl",
    "harness.rank.process",
    "harness.train",
)
"""Modules that a rank needs; without ``torch._dynamo`` the first optimizer of each rank would import it, for 1-2 s."""


class Server:
    """Single-threaded, because a fork copies only one thread."""

    def __init__(self, channel: socket.socket, parent: int) -> None:
        self._pid = os.getpid()
        self._parent = parent
        self._channel = channel
        self._buffer = b""
        self._ranks: set[int] = set()
        self._wake, wake = os.pipe()
        # Python insists: a pipe that is full must not hold up a signal.
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        # A handler that does nothing, as without one the signal would not reach Python, and write no byte.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Answer until the parent is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            if (parent := pidfd_of(self._parent)) >= 0:
                selector.register(parent, selectors.EVENT_READ)
            # Where there is no descriptor of the parent, the next event finds that it is gone.
            while os.getppid() == self._parent:
                for key, _ in selector.select():
                    if key.fileobj is self._channel:
                        if not self._read():
                            return
                    elif key.fileobj == self._wake:
                        os.read(self._wake, 4096)
                        # Every rank that has ended: one signal may stand for several.
                        self._reap()

    def end_ranks(self) -> None:
        """Kill what is left."""
        for pid in self._ranks:
            signal_group(pid, signal.SIGKILL)

    def _read(self) -> bool:
        received = self._channel.recv(1 << 20)
        if not received:
            return False
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            self._answer(json.loads(line))
        return True

    def _answer(self, request: dict[str, Any]) -> None:
        if "probe" in request:
            from harness.rank.backend import probe

            self._send({"probe": probe()})
        else:
            self._send({"pids": [self._fork(rank) for rank in request["start"]]})

    def _fork(self, rank: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            self._become(rank)
        self._ranks.add(pid)
        return pid

    def _become(self, rank: dict[str, Any]) -> NoReturn:
        """Turn this copy of the server into a rank."""
        try:
            os.setsid()
            # The pipe is the server's: a signal to the rank would wake that one.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            os.environ.clear()
            os.environ.update(rank["env"], **{PARENT: str(self._pid)})
            from harness.rank.process import main

            main(rank["run"], forked=True)
        finally:
            # Never back into the server's loop, of which this is a copy.
            os._exit(1)

    def _reap(self) -> None:
        while self._ranks and (ended := _first_ended()):
            # The zombie keeps its group's number taken until what it left behind is gone.
            signal_group(ended, signal.SIGKILL)
            _, status = os.waitpid(ended, 0)
            self._ranks.discard(ended)
            self._send({"exit": [ended, os.waitstatus_to_exitcode(status)]})

    def _send(self, answer: dict[str, Any]) -> None:
        # A parent that is gone: serve() finds that by itself.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(json.dumps(answer).encode() + b"\n")


def _first_ended() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended else None


def main(descriptor: int, parent: int) -> None:
    """Import, then serve."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # Nobody listens to the socket while torch is imported: until then the kernel watches the parent.
    die_with_parent(parent)
    with uncollected():
        for module in PRELOAD:
            importlib.import_module(module)
    # It would also come at the end of the thread that started this process, whose run may be over by now.
    outlive_parent()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    # A rank's collections would write to every page that it shares with this process, and so copy it.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as channel:
        server = Server(channel, parent)
        server._send({"ready": threads})
        try:
            server.serve()
        finally:
            server.end_ranks()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The launchers of this process: each made once, the warm server among them, and ended with the process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from harness.errors import HarnessError
from harness.launchers.base import Launcher, WarmLauncher, module_command
from harness.launchers.inline import InlineLauncher
from harness.launchers.launch import LaunchLauncher
from harness.launchers.spawn import SpawnLauncher
from harness.launchers.torchrun import TorchrunLauncher
from harness.run.environment import import_path
from harness.run.launch_methods import traits_of
from harness.run.placement import Machine

LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "spawn": SpawnLauncher,
    "launch": LaunchLauncher,
    "torchrun": TorchrunLauncher,
    "inline": InlineLauncher,
}
"""Name, as typed after ``launcher=``, -> the class of it."""

_launchers: dict[str, Launcher] = {}
# In a list, so that a forked process can replace one that another thread held.
_locks = [threading.Lock()]


def launcher(method: str) -> Launcher:
    """Return this process's launcher of that name."""
    # Two threads that ask at once would each start a server.
    with _locks[0]:
        if method not in _launchers:
            _launchers[method] = LAUNCHERS[method]()
        return _launchers[method]


def warm_up() -> None:
    """Have the warm server import torch from now on, while this process goes on."""
    _warm_launcher().warm()


def warm_up_for(arguments: Sequence[str]) -> None:
    """Warm up if a command with these arguments is going to fork ranks; a needless import of torch would slow the others."""
    asks = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
    launchers = [argument.partition("=")[2] for argument in arguments if argument.startswith("launcher=")]
    # Where no launcher is named it is spawn, which forks: all() of nothing is True.
    if asks.isdisjoint(argument.partition("=")[0] for argument in arguments) and all(map(_may_use_server, launchers)):
        warm_up()


def _warm_launcher() -> WarmLauncher:
    return cast(WarmLauncher, launcher(next(name for name in LAUNCHERS if traits_of(name).server_start_method)))


def _may_use_server(names: str) -> bool:
    return any(traits_of(name).server_start_method for name in names.split(","))


def probe() -> dict[str, Any]:
    """Return what a process with torch sees of this machine: the warm server if there is one, else one for the purpose."""
    served = _warm_launcher()
    # It has torch, or is about to have it: a process for the purpose would import that once more.
    if served.is_warm:
        return dict(served.warm().probe())
    environment = {**os.environ, "PYTHONPATH": import_path(os.environ)}
    command = module_command("harness.rank.backend")
    try:
        answer = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise HarnessError(f"{sys.executable} could not be started: {error}.") from error
    if answer.returncode:
        raise HarnessError(f"torch cannot be imported by {sys.executable}:\n{answer.stderr.strip()[-2000:]}")
    return dict(json.loads(answer.stdout))


@functools.cache
def machine() -> Machine:
    """Return what a process with torch sees of this machine; asked once."""
    return Machine(**probe())


def _forget() -> None:
    """Drop what belongs to the process that this one was forked from: two would talk to one server."""
    _launchers.clear()
    _locks[0] = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def close_all() -> None:
    """End what launchers keep alive."""
    for running in _launchers.values():
        running.close()
    _launchers.clear()


def _close_at_exit() -> None:
    """End what launchers keep alive, whatever a second Ctrl-C says meanwhile: this process ends in any case."""
    # Python lets the main thread alone set a handler.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    close_all()


atexit.register(_close_at_exit)

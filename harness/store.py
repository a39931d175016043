"""The rendezvous of a one-machine run: a TCP store that listens on loopback only.

torch's own ``env://`` rendezvous lets rank 0 listen on every interface. Here rank 0 binds 127.0.0.1, tells the others its
port through the run's folder, and hands the bound socket to torch when the task first imports ``torch.distributed``; every
rank, rank 0 included, then connects as a client. A task that never communicates never pays for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from harness.environ import RankEnvironment
from harness.rundir import RunDir, has_end, write_json

_RENDEZVOUS = "torch.distributed.rendezvous"
_HOST = "127.0.0.1"
_kept: list[Any] = []


def offer_store(run: RunDir, who: RankEnvironment) -> None:
    """Set MASTER_ADDR and MASTER_PORT to a store that rank 0 of this run owns."""
    port = _own_store(run) if who.rank == 0 else _await_port(run)
    # With an agent's store, torch makes every rank a client.
    os.environ.update(MASTER_ADDR=_HOST, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def keep_store(run: RunDir, world_size: int) -> None:
    """Return when no other rank can need this rank's store any more: each has recorded its end, whichever."""
    while _kept and not all(has_end(run.records(rank)) for rank in range(1, world_size)):
        time.sleep(0.005)


def withdraw_store() -> None:
    """Stop serving, in a process that goes on."""
    _kept.clear()
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _ServeWhenImported)]:
        sys.meta_path.remove(finder)
        finder.listener.close()


def _own_store(run: RunDir) -> int:
    listener = socket.socket()
    listener.bind((_HOST, 0))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    write_json(run.store, {"port": port})
    if _RENDEZVOUS in sys.modules:
        _serve(listener)
    else:
        sys.meta_path.insert(0, _ServeWhenImported(listener))
    return port


def _await_port(run: RunDir) -> int:
    """Return rank 0's port; the supervisor ends this rank if rank 0 never comes to offer one."""
    while not run.store.exists():
        time.sleep(0.002)
    return int(json.loads(run.store.read_text())["port"])


def _serve(listener: socket.socket) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    # wait_for_workers=False: the store serves groups of any size, also none.
    _kept.append(TCPStore(_HOST, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()))


class _ServeWhenImported(MetaPathFinder):
    """Starts the store right after torch's rendezvous module has been imported."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_serve(module: ModuleType) -> None:
            execute(module)
            _serve(self.listener)

        spec.loader.exec_module = execute_and_serve  # type: ignore[method-assign]
        return spec

"""The rendezvous of a one-machine run: a TCP store that listens on loopback only.

torch's own ``env://`` rendezvous lets rank 0 listen on every interface. Here rank 0 binds 127.0.0.1, tells the others its
port through the run's folder, and hands the bound socket to torch when the task first imports ``torch.distributed``; every
rank, rank 0 included, then connects as a client. A task that never communicates never pays for it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from harness.errors import ConfigError, HarnessError
from harness.rank.importing import when_imported
from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir, has_end, read_json, write_json

_RENDEZVOUS = "torch.distributed.rendezvous"
_HOST = "127.0.0.1"
_kept: list[Any] = []
_offers: list[Callable[[], None]] = []


def offer_store(run: RunDir, who: RankEnvironment, wanted: int | None = None) -> None:
    """Set MASTER_ADDR and MASTER_PORT to a store that rank 0 of this run owns.

    Args:
        wanted: Its port; None for one that the system chooses.

    Raises:
        ConfigError: The port is taken.
        HarnessError: This machine has no port to give.
    """
    port = _own_store(run, wanted) if who.rank == 0 else _await_port(run)
    # Undocumented: where torch's agent has a store, torch makes every rank a client of it, and here there is one.
    os.environ.update(MASTER_ADDR=_HOST, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def keep_store(run: RunDir, world_size: int) -> None:
    """Return when no other rank can need this rank's store any more: each has recorded its end, whichever."""
    # A task that has not imported torch.distributed has served no store, and has nothing to wait for.
    while _kept and not all(has_end(run.records(rank)) for rank in range(1, world_size)):
        time.sleep(0.005)


def withdraw_store() -> None:
    """Stop serving, in a process that goes on."""
    for withdraw in _offers:
        withdraw()
    _offers.clear()
    _kept.clear()


def _own_store(run: RunDir, wanted: int | None) -> int:
    listener = socket.socket()
    # A port that an earlier run has left is free at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, wanted or 0))
    except OSError as error:
        listener.close()
        raise _cannot_listen(wanted, error) from None
    # All ranks may connect before torch, which is still being imported, accepts one: the kernel holds them so long.
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    # Once it listens: whoever reads the port can connect at once.
    write_json(run.store, {"port": port, "attempt": _attempt()})
    # Once torch has the socket, closing it here has no effect.
    _offers.extend([when_imported(_RENDEZVOUS, lambda: _serve(listener)), listener.close])
    return port


def _cannot_listen(wanted: int | None, error: OSError) -> HarnessError:
    if wanted is None:
        return HarnessError(f"rank 0 cannot listen on {_HOST}, where the ranks meet: {error.strerror}.")
    return ConfigError(f"--master={_HOST}:{wanted} cannot be used: {error.strerror}. Leave it out: then a free port is found.")


def _await_port(run: RunDir) -> int:
    """Return rank 0's port; the supervisor ends this rank if rank 0 never comes to offer one."""
    while True:
        if run.store.exists():
            offer = read_json(run.store)
            if offer["attempt"] == _attempt():
                return int(offer["port"])
        time.sleep(0.002)


def _attempt() -> str:
    """Return how often torch's agent has started these ranks again: an earlier attempt's store is gone."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _serve(listener: socket.socket) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Before detach(), after which the socket is torch's.
    port = listener.getsockname()[1]
    # wait_for_workers=False: the store serves groups of any size, also none.
    _kept.append(TCPStore(_HOST, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()))

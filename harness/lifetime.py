"""A process that ends when its parent does, whatever ended the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGKILL when its parent ends (Linux; elsewhere the supervisor's signals remain).

    Args:
        parent: The parent's process id; this process exits at once if that one is gone already.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def worker_dies_with_rank(worker_id: int) -> None:
    """Have a DataLoader worker end with the rank it was forked by (a ``worker_init_fn``); torch's own check takes seconds."""
    die_with_parent(os.getppid())

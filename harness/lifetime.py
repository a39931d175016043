"""A process that ends when its parent does, whatever ended the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
# Looked up here, because a forked child must not: another thread may have held the loader's lock.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform.startswith("linux") else None


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGKILL when its parent ends (Linux; elsewhere the supervisor's signals remain).

    Args:
        parent: The parent's process id; this process exits at once if that one is gone already.
    """
    if _prctl is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def children_die_with_this_process() -> None:
    """Have every process that Python forks from this one, and from those in turn, end with its parent (DataLoader workers).

    Only children of a main thread: the kernel's signal comes at the end of the thread that forked.
    """
    forks_in_main_thread = [0]

    def before() -> None:
        forks_in_main_thread[0] = os.getpid() if threading.get_native_id() == os.getpid() else 0

    def in_child() -> None:
        if forks_in_main_thread[0]:
            die_with_parent(forks_in_main_thread[0])

    os.register_at_fork(before=before, after_in_child=in_child)


def worker_dies_with_rank(worker_id: int) -> None:
    """End this DataLoader worker with its rank; by itself it looks for its parent every 5 s. A ``worker_init_fn``."""
    del worker_id
    die_with_parent(os.getppid())

"""A process that ends when its parent does, whatever ended the parent, and that leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path

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
    # After the request: a parent that had ended before it would never send the signal.
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Take :func:`die_with_parent` back."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def children_die_with_this_process() -> Callable[[], None]:
    """Have every process that Python forks from this one, and from those in turn, end with its parent (DataLoader workers).

    Only children of a main thread: the kernel's signal comes at the end of the thread that forked.

    Returns:
        What takes it back.
    """
    _tying.parent = os.getpid()
    if not _tying.is_hooked:
        os.register_at_fork(before=_tying.before_fork, after_in_child=_tying.after_fork)
        # By multiprocessing's own hook: at that of os.fork(), current_process() is still the parent's.
        util.register_after_fork(_tying, _Tying.move_in)
        _tying.is_hooked = True

    def take_back() -> None:
        _tying.parent = 0

    return take_back


class _Tying:
    """What a fork does to tie a child to its parent: hooks cannot be unregistered.

    Attributes:
        parent: The process whose children are tied; 0 for none.
        temp_dir: The folder that they sign in, and keep the sockets of ``multiprocessing`` in; None without one.
    """

    def __init__(self) -> None:
        self.parent = 0
        self.temp_dir: Path | None = None
        self.is_hooked = False
        self._ties = False

    def before_fork(self) -> None:
        # The main thread has the process's number; the kernel's signal comes with the end of the thread that forked.
        self._ties = self.parent == os.getpid() == threading.get_native_id()

    def after_fork(self) -> None:
        if not self.parent:
            return
        sign()
        if self._ties:
            die_with_parent(self.parent)
        self.parent = os.getpid()

    def move_in(self) -> None:
        """Take the temporary folder, in a child that ``multiprocessing`` has made."""
        # Private, as in used_by_multiprocessing().
        if self.temp_dir is not None:
            multiprocessing.current_process()._config["tempdir"] = str(self.temp_dir)  # type: ignore[attr-defined]


_tying = _Tying()


def sign() -> None:
    """Have what this process leaves in shared memory removed once it has ended, if it uses a temporary folder."""
    if _tying.temp_dir is None:
        return
    # Not there: the program has ended, and so does this process.
    with contextlib.suppress(OSError):
        (_tying.temp_dir / "processes" / str(os.getpid())).touch()


@contextmanager
def used_by_multiprocessing(temp_dir: Path, outlives_it: bool = False) -> Iterator[None]:
    """Have ``multiprocessing`` keep its sockets and semaphores where they are removed, and sign.

    Args:
        outlives_it: True where this process goes on when the folder is gone: then only its children keep sockets there.
    """
    # Private: where multiprocessing looks for both. A variable would be heeded by whatever else this process starts.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    ours = {"semprefix": f"/{temp_dir.name}"} | ({} if outlives_it else {"tempdir": str(temp_dir)})
    before = {name: config.get(name) for name in ours}
    config.update(ours)
    _tying.temp_dir = temp_dir
    sign()
    try:
        yield
    finally:
        _tying.temp_dir = None
        # A tempdir of None is one that multiprocessing has yet to make.
        config.update(before)

"""This process's standard output and error, whose reader may pause: a pager, or a terminal stopped by Ctrl-S."""

from __future__ import annotations

import os
import select
import sys


def stalled(patience_s: float = 0.0) -> list[int]:
    """Return the descriptors of standard output and error that take nothing for ``patience_s``: to write there would block."""
    return [descriptor for descriptor in _descriptors() if not _takes(descriptor, patience_s)]


def give_up_stalled() -> None:
    """Have nothing block on a reader that takes nothing, at the end of this process: what is written to it is lost."""
    # A reader that is merely slow has time to take what is there.
    for descriptor in stalled(patience_s=0.3):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _descriptors() -> set[int]:
    descriptors = set()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            descriptors.add(stream.fileno())
        # Closed, or replaced by an object without a descriptor, as notebooks and tests do.
        except (OSError, ValueError, AttributeError):
            continue
    return descriptors


def _takes(descriptor: int, patience_s: float) -> bool:
    """Return True where a write of a few lines is taken, or fails, at once."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(1000 * patience_s))

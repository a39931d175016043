"""Signals to the parent while ranks run."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(BaseException):
    """A signal told this process to end; the ranks are gone by then.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


class SignalTrap:
    """Catches SIGINT, SIGTERM and SIGHUP while ranks run, also where a shell has set SIGINT to be ignored.

    SIGHUP stays ignored under ``nohup``, which is what that command is for.
    """

    def __init__(self) -> None:
        self._caught: int | None = None
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> SignalTrap:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for descriptor in self._pipe or ():
            os.close(descriptor)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = self._caught or number
        if self._pipe is not None:
            os.write(self._pipe[1], b"!")

    def fileno(self) -> int:
        """Return a descriptor that is readable once a signal has come; -1 outside the main thread."""
        return self._pipe[0] if self._pipe else -1

    def raise_if_caught(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._caught is not None:
            raise Interrupted(self._caught)

"""Signals to the parent while ranks run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which users and systems end a program."""


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

    Attributes:
        is_pressing: True where a signal has come since Interrupted was last raised.
    """

    active: ClassVar[SignalTrap | None] = None

    def __init__(self) -> None:
        self._caught: int | None = None
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._raises_at_once = False
        self._raises_in_output = False
        self.is_pressing = False

    def __enter__(self) -> SignalTrap:
        # Python lets the main thread alone set handlers: a run in another thread hears of no signal.
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            for number in ENDING:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._catch)
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
                # Ignored, the kernel would throw away the exit codes of the ranks.
                self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            SignalTrap.active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if SignalTrap.active is self:
            SignalTrap.active = None
        for number, handler in self._before.items():
            # None: it had been set by C code, which Python cannot restore.
            if handler is not None:
                signal.signal(number, handler)
        for descriptor in self._pipe or ():
            os.close(descriptor)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        # By the first one the program ends, whatever comes after.
        self._caught = self._caught or number
        self.is_pressing = True
        if self._pipe is not None:
            # Wakes the selector, which Python would otherwise go back to after the handler.
            os.write(self._pipe[1], b"!")
        if self._raises_at_once:
            # Interrupted at any place, DataLoader may wait in vain for workers that it has not asked to end. Of their end it
            # would hear by SIGCHLD, and raise an error of its own.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for child in sys.modules["multiprocessing"].active_children() if "multiprocessing" in sys.modules else ():
                child.kill()
        if self._raises_at_once or self._raises_in_output:
            self.raise_if_caught()

    @contextlib.contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Raise Interrupted wherever this process is: it runs a rank itself, and nobody watches."""
        self._raises_at_once = True
        try:
            yield
        finally:
            self._raises_at_once = False

    @contextlib.contextmanager
    def raising_in_output(self) -> Iterator[None]:
        """Raise Interrupted out of a write that blocks, which Python would otherwise start again for ever."""
        self._raises_in_output = True
        try:
            yield
        finally:
            self._raises_in_output = False

    def fileno(self) -> int:
        """Return a descriptor that is readable once a signal has come; -1 outside the main thread."""
        return self._pipe[0] if self._pipe else -1

    def raise_if_caught(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._caught is not None:
            self.is_pressing = False
            raise Interrupted(self._caught)


def raise_if_interrupted() -> None:
    """Raise Interrupted if a signal has come to the run that is being started; for waits before anybody watches."""
    if SignalTrap.active is not None:
        SignalTrap.active.raise_if_caught()


def is_pressed() -> bool:
    """Return True where a signal has come that has not been heeded yet."""
    return SignalTrap.active is not None and SignalTrap.active.is_pressing


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Return the active trap's :meth:`SignalTrap.raising_at_once`."""
    return SignalTrap.active.raising_at_once() if SignalTrap.active is not None else contextlib.nullcontext()

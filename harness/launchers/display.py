"""What is shown of a run while it lasts, to a console whose reader may pause."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from harness.launchers import console
from harness.launchers.signals import SignalTrap
from harness.launchers.tail import Tail


class Observer(Protocol):
    """Whoever shows a run while it lasts."""

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take in one event of one rank."""

    def output(self, line: str) -> None:
        """Take in one line that rank 0 printed."""


class Display:
    """Hands an observer what comes, as far as the console takes it."""

    def __init__(self, observer: Observer | None, output: Tail | None) -> None:
        self._observer = observer
        self._output = output
        self._unshown: deque[Callable[[], None]] = deque()

    @property
    def is_behind(self) -> bool:
        """True where something waits to be shown."""
        return bool(self._unshown)

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Keep one event to be shown."""
        if self._observer is not None:
            self._unshown.append(partial(self._observer.event, rank, event))

    def show(self, trap: SignalTrap, is_over: bool) -> bool:
        """Show what is new; True where that is all."""
        self._pour(trap)
        # Not while events wait: lines that the console does not take stay in the log, and need no memory here.
        if not self._unshown and self._observer is not None and self._output is not None:
            lines = self._output.lines(to_the_end=is_over)
            self._unshown.extend(partial(self._observer.output, line) for line in lines)
            self._pour(trap)
        return not self._unshown

    def _pour(self, trap: SignalTrap) -> None:
        # Even a console that takes something may block on a line that is longer than what it takes.
        with trap.raising_in_output():
            while self._unshown and not console.stalled():
                # Taken out first: what a signal interrupts is not shown a second time.
                self._unshown.popleft()()

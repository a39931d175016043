"""What is known of one rank while it runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.launchers.tail import Tail


@dataclass(frozen=True)
class Ending:
    """How a rank's process ended.

    Attributes:
        code: Its exit code, negative for a signal.
        t: When (CLOCK_MONOTONIC, in seconds).
        server: Exit code of the warm server whose death ended it; None where it ended otherwise.
        attempt: Which start of the ranks it ended, from 0, where torch's agent starts them again.
        is_unheard: True where that start left nothing, so that all that the rank has recorded is of an earlier one.
    """

    code: int
    t: float
    server: int | None = None
    attempt: int = 0
    is_unheard: bool = False


@dataclass
class RankState:
    """One rank, as far as the supervisor has heard.

    Attributes:
        rank: Its number.
        records: What it records, as it comes.
        pid: As it recorded it; None before it did.
        ending: How its process ended; None while it runs.
        has_finished: True once it has recorded its end.
        has_left: True once it has recorded an end that is no exception.
        is_joining: True once it has begun to join the group.
        has_joined: True once it has joined the group.
        heard: When it last recorded or printed something (CLOCK_MONOTONIC, in seconds).
        printed: Bytes that it has printed.
        is_stopped: True where it ran still when all were told to end.
    """

    rank: int
    records: Tail
    pid: int | None = None
    ending: Ending | None = None
    has_finished: bool = False
    has_left: bool = False
    is_joining: bool = False
    has_joined: bool = False
    # From the beginning, so that a rank which never says anything is found to be silent.
    heard: float = field(default_factory=time.monotonic)
    printed: int = 0
    is_stopped: bool = False

    @property
    def is_running(self) -> bool:
        """True where it has started, and neither recorded an end nor ended."""
        return self.pid is not None and not self.has_finished and self.ending is None

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one event; a start is one again where torch's agent has restarted the rank."""
        kind = event["event"]
        if kind == "start":
            # What was heard of its earlier start would have this one taken for finished.
            self.pid = event["pid"]
            self.has_finished = self.has_left = self.is_joining = self.has_joined = False
        elif kind == "joining":
            self.is_joining = True
        elif kind == "joined":
            self.has_joined = True
        elif kind == "end":
            self.has_finished = True
            self.has_left = self.has_left or event["status"] != "raised"

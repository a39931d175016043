"""The console of a script's run: rank 0's output as it comes, and the other ranks' warnings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO


class Console:
    """Shows rank 0's output as it comes, and the other ranks' warnings."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Show a log record that a rank has forwarded."""
        if event["event"] == "log":
            print(f"[rank {rank}] {event['level']}: {event['text']}", file=sys.stderr, flush=True)

    def output(self, line: str) -> None:
        """Show a line of rank 0."""
        # Looked up for each line: whoever called may have put another in its place since.
        stream = self._output or sys.stdout
        try:
            # Flushed: into a pipe, Python would keep lines back until their block is full.
            print(line, file=stream, flush=True)
        except UnicodeEncodeError:
            # A rank may print what this terminal, or LANG=C, has no letters for.
            encoding = stream.encoding or "ascii"
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)

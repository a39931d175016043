"""Following a file that grows."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """Reads the whole lines that have been added to a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self, to_the_end: bool = False) -> list[str]:
        """Return the lines that are new.

        Args:
            to_the_end: True where nobody writes any more: a last line without its end is a line too.
        """
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size <= self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        # A line that is still being written is left for the next look.
        whole = content if to_the_end else content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        # Not splitlines(): a progress bar's carriage returns belong to its line.
        return whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else []

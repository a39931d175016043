"""Following a file that grows."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """Reads the whole lines that have been added to a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """Return the lines that are new; a line without its end waits for it."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size <= self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()

"""A table and its sentences as lines of text that fit a width. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from harness.report.sweep.table import Table, grouped_by_cell

GAP = "  "
LEAST_CELL = 12
"""A cell that has to be cut keeps at least so many characters."""

BELOW = ("verified", "arithmetic")
"""Last columns that may go below the table: few different cells, each long."""

Line = tuple[str, str]
"""Text and the state that decides its colour: ``head``, ``ok``, ``failed``, ``red`` or ``note``."""


def table_lines(table: Callable[[bool], Table], width: int) -> list[Line]:
    """Return the lines of a table, none wider than ``width``.

    Columns stand side by side as long as they fit, first with whole cells, then with short ones, then with the last one
    below the table; after that each job gets a paragraph.

    Args:
        table: Makes it, with short cells where it is told True.
    """
    # Whole cells wherever they fit: short ones leave out what a reader would have to look up.
    for variant in (table(False), table(True)):
        if table_width(variant) <= width:
            return side_by_side(variant)
    narrow = table(True)
    last = narrow.columns[-1]
    # It costs lines, but all numbers stay in columns, where they can be compared.
    if last in BELOW and table_width(narrow.without(last)) <= width:
        return side_by_side(narrow.without(last)) + below(narrow, last, width)
    return stacked(narrow, width)


def table_width(table: Table) -> int:
    """Return how many characters its columns take side by side."""
    return sum(_widths(table)) + len(GAP) * (len(table.columns) - 1)


def side_by_side(table: Table) -> list[Line]:
    """Return a line of headings and one for each row; numbers are aligned to the right."""
    widths = _widths(table)

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, table.numeric, strict=True)]
        return GAP.join(padded).rstrip()

    rows = [(line(row), state) for row, state in zip(table.rows, table.states, strict=True)]
    return [(line(table.columns), "head"), *rows]


def _widths(table: Table) -> list[int]:
    columns = zip(table.columns, *table.rows, strict=True)
    return [max(len(cell) for cell in column) for column in columns]


def below(table: Table, name: str, width: int) -> list[Line]:
    """Return what one column says, with the jobs that it says it of."""
    groups = grouped_by_cell(table, name)
    if len(groups) == 1:
        # All jobs alike: their numbers would say nothing.
        return [(f"{name}: {groups[0][0]}", "note")]
    lines: list[Line] = []
    for cell, jobs in groups:
        # By its words, as a cell that several rows share has no row's state.
        state = "red" if cell.startswith(("FAILED", "failed")) else "note"
        lines += [(text, state) for text in paragraph(f"{name}: {cell} (job {jobs})", width)]
    return lines


def stacked(table: Table, width: int) -> list[Line]:
    """Return a paragraph for each row."""
    lines: list[Line] = []
    for row, state in zip(table.rows, table.states, strict=True):
        # By the longest number, so that all paragraphs begin at one place.
        indent = len("job ") + max(len(cells[0]) for cells in table.rows) + len(GAP)
        named = [" ".join(f"{name} {cell}".split()) for name, cell in zip(table.columns[1:], row[1:], strict=True) if cell]
        filled = flow(named, width - indent)
        heads = [f"job {row[0]}".ljust(indent)] + [" " * indent] * (len(filled) - 1)
        lines += [((head + text).rstrip(), state) for head, text in zip(heads, filled, strict=True)]
    return lines


def flow(pieces: Iterable[str], width: int) -> list[str]:
    """Return the pieces, side by side in as few lines as they fit; one that is too long by itself loses its middle."""
    lines = [""]
    for piece in (shortened(piece, width) for piece in pieces):
        longer = f"{lines[-1]}{GAP}{piece}" if lines[-1] else piece
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(piece)
    return lines


def shortened(text: str, width: int) -> str:
    """Return ``text``, with dots for its middle where it is longer than ``width``."""
    room = max(width, LEAST_CELL)
    if len(text) <= room:
        return text
    # Paths and long settings differ at their ends.
    left = (room - 3) // 2
    return f"{text[:left]}...{text[len(text) - (room - 3 - left) :]}"


def paragraph(text: str, width: int) -> list[str]:
    """Return ``text`` in lines broken between words; a word that is too long, such as a path, stays whole."""
    lines = []
    # What is to be typed or opened is copied, and so must not be broken.
    for part in text.splitlines() or [""]:
        lines += textwrap.wrap(
            part, max(20, width), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        ) or [""]
    return lines


def both_ends(left: str, right: str, width: int) -> list[str]:
    """Return ``left`` and ``right`` at the two ends of one line, or in lines of their own where they do not fit."""
    if len(left) + len(GAP) + len(right) <= width:
        return [left + right.rjust(width - len(left))]
    return [*flow(left.split(GAP), width), right]

"""Pictures that are a grid of passed, failed and not checked: the checks, and the fault matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from harness.report.figures.theme import BLUE, GREY, RED, Drawing, figure, shorten
from harness.report.sweep.sweep_report import SweepReport

MARKS = {"passed": ("o", BLUE), "failed": ("X", RED), "not checked": ("_", GREY)}
"""Status -> (marker, colour): shape and colour say the same."""
MOST_ROWS = 60

Grid = Mapping[str, Mapping[str, str]]
"""Name of a row -> name of a column -> status."""


def checks_grid(sweep: SweepReport) -> Drawing | None:
    """Draw which checks each job passed."""
    rows = {
        f"job {job.plan.job}": {f"{check.name} {check.title}": check.status for check in job.correctness.checks}
        for job in sweep.jobs
        if job.correctness is not None
    }
    return grid("checks", "Checks", rows, "the job")


def fault_matrix(sweep: SweepReport) -> Drawing | None:
    """Draw which checks found which injected fault: there, a red cross is what should be."""
    return grid("faults", "Fault matrix: which check finds which injected fault", sweep.faults, "the fault")


def grid(name: str, title: str, rows: Grid, what: str) -> Drawing | None:
    """Draw a mark for each row and column; None without rows."""
    if not rows:
        return None
    shown = dict(list(rows.items())[:MOST_ROWS])
    columns = list(dict.fromkeys(column for cells in shown.values() for column in cells))
    # As high as its rows, so that marks do not overlap, plus room for slanted labels and the legend.
    made, (axes,) = figure(2.3 + 0.26 * len(shown))
    _draw(axes, shown, columns)
    remark = f" (first {MOST_ROWS} of {len(rows)})" if len(rows) > MOST_ROWS else ""
    axes.set_title(f"{title}{remark}", pad=10)
    handles = [axes.plot([], [], marker, color=colour, label=status)[0] for status, (marker, colour) in MARKS.items()]
    made.legend(handles=handles, loc="outside lower center", ncols=3)
    return Drawing(name, title, _alt(title, rows, what), made)


def _draw(axes: Axes, rows: Grid, columns: Sequence[str]) -> None:
    # A check that a row lacks leaves its place empty: any mark would say that it was looked at.
    cells = [(x, y, row.get(column)) for y, row in enumerate(rows.values()) for x, column in enumerate(columns)]
    for status, (marker, colour) in MARKS.items():
        marked = [(x, y) for x, y, shown in cells if shown == status]
        axes.plot([x for x, _ in marked], [y for _, y in marked], marker, color=colour, markersize=8)
    axes.set_xticks(range(len(columns)), [shorten(column, 26) for column in columns], rotation=35, ha="right", fontsize=9)
    axes.set_yticks(range(len(rows)), [shorten(row) for row in rows])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    # From high to low, so that the first row is on top, as in the table.
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _alt(title: str, rows: Grid, what: str) -> str:
    failed = {row: [column for column, status in cells.items() if status == "failed"] for row, cells in rows.items()}
    lines = [f"{row}: {', '.join(columns)}" for row, columns in failed.items() if columns]
    return f"{title}: a row for {what}, a column for the check. Failed: {'; '.join(lines[:20]) or 'none'}."

"""Every check of every verified job, as tables: what was compared, by which bound and whose, or why not. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.compare.correctness.verdict import Check, Verdict
from harness.report.sweep.sweep_report import SweepReport
from harness.report.sweep.table import Table, ranges

MOST_TABLES = 20
"""So many tables are shown; ``report.json`` holds the checks of every job."""
COLUMNS = ("check", "about", "status", "seen", "threshold", "origin", "what was compared, or why not")
_NUMERIC = (False, False, False, True, True, False, False)


@dataclass(frozen=True)
class ChecksTable:
    """The checks of jobs that came to the same.

    Attributes:
        title: Which jobs, and the verdict on them.
        is_red: Whether a check failed.
        table: A row for each check; where numbers differ between the jobs, the worst.
    """

    title: str
    is_red: bool
    table: Table


def check_tables(sweep: SweepReport) -> tuple[list[ChecksTable], str]:
    """Return the tables, red ones first, and a sentence on those that are not shown, if any."""
    groups: dict[object, dict[int, Verdict]] = {}
    for job in sweep.jobs:
        if job.correctness is not None:
            # Where a red verdict is wrong differs from job to job, so that it stands by itself.
            alone = job.plan.job if job.correctness.failed is not None else None
            outcome = tuple((check.name, check.status, check.threshold, check.origin) for check in job.correctness.checks)
            groups.setdefault((alone, outcome), {})[job.plan.job] = job.correctness
    # Red first, as those beyond the most that are shown are cut off.
    tables = sorted((_checks_table(verdicts) for verdicts in groups.values()), key=lambda table: not table.is_red)
    more = len(tables) - MOST_TABLES
    rest = f"Of {more} more jobs, or groups of them, report.json holds the checks." if more > 0 else ""
    return tables[:MOST_TABLES], rest


def _checks_table(verdicts: dict[int, Verdict]) -> ChecksTable:
    first = next(iter(verdicts.values()))
    # They stand side by side, as the jobs of a group have the same names of checks in the same order.
    checks = list(zip(*(verdict.checks for verdict in verdicts.values()), strict=True))
    rows = tuple(_row(list(verdicts), alike) for alike in checks)
    states = tuple("red" if alike[0].status == "failed" else "ok" for alike in checks)
    jobs = (next(iter(verdicts)),) * len(rows)
    title = f"Job {ranges(list(verdicts))}: {first.label}"
    return ChecksTable(title, first.failed is not None, Table(COLUMNS, _NUMERIC, rows, jobs, states))


def _row(jobs: Sequence[int], alike: Sequence[Check]) -> tuple[str, ...]:
    check = alike[0]
    details = dict.fromkeys(each.detail for each in alike)
    detail = check.detail if len(details) == 1 else f"{check.detail} (job {jobs[0]}; the others alike)"
    # Without a number, bits or whole sets were held against each other.
    threshold = "equal" if check.threshold is None else f"{check.threshold:.3g}"
    return check.name, check.title, check.status, _worst(alike), threshold, check.origin, f"{detail}{place(check)}"


def _worst(alike: Sequence[Check]) -> str:
    seen = [check.quantity for check in alike if check.quantity is not None]
    # NaN compares as wrong, and so is worse than any number.
    return f"{max(seen, key=lambda value: math.inf if math.isnan(value) else value):.3g}" if seen else ""


def place(check: Check) -> str:
    """Return where a red check is wrong, in words that follow others; empty where that is not known."""
    where = ", ".join(f"{name} {value}" for name, value in (check.where or {}).items())
    return f" at {where}" if where else ""

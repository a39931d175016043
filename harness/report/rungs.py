"""Every check of every verified job, as tables: what was compared, by which bound and whose, or why not. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.compare.correctness import Rung, Verdict
from harness.report.sweep_report import SweepReport
from harness.report.table import Table, ranges

MOST_LADDERS = 20
"""So many tables are shown; ``report.json`` holds the checks of every job."""
COLUMNS = ("check", "about", "status", "seen", "threshold", "origin", "what was compared, or why not")
_NUMERIC = (False, False, False, True, True, False, False)


@dataclass(frozen=True)
class Ladder:
    """The checks of jobs that came to the same.

    Attributes:
        title: Which jobs, and the verdict on them.
        is_red: Whether a check failed.
        table: A row for each check; where numbers differ between the jobs, the worst.
    """

    title: str
    is_red: bool
    table: Table


def ladders(sweep: SweepReport) -> tuple[list[Ladder], str]:
    """Return the tables, red ones first, and a sentence on those that are not shown, if any."""
    groups: dict[object, dict[int, Verdict]] = {}
    for job in sweep.jobs:
        if job.correctness is not None:
            alone = job.plan.job if job.correctness.failed is not None else None
            outcome = tuple((rung.name, rung.status, rung.threshold, rung.origin) for rung in job.correctness.rungs)
            groups.setdefault((alone, outcome), {})[job.plan.job] = job.correctness
    found = sorted((_ladder(verdicts) for verdicts in groups.values()), key=lambda ladder: not ladder.is_red)
    more = len(found) - MOST_LADDERS
    rest = f"Of {more} more jobs, or groups of them, report.json holds the checks." if more > 0 else ""
    return found[:MOST_LADDERS], rest


def _ladder(verdicts: dict[int, Verdict]) -> Ladder:
    first = next(iter(verdicts.values()))
    rungs = list(zip(*(verdict.rungs for verdict in verdicts.values()), strict=True))
    rows = tuple(_row(list(verdicts), alike) for alike in rungs)
    states = tuple("red" if alike[0].status == "failed" else "ok" for alike in rungs)
    jobs = (next(iter(verdicts)),) * len(rows)
    title = f"Job {ranges(list(verdicts))}: {first.label}"
    return Ladder(title, first.failed is not None, Table(COLUMNS, _NUMERIC, rows, jobs, states))


def _row(jobs: Sequence[int], alike: Sequence[Rung]) -> tuple[str, ...]:
    rung = alike[0]
    details = dict.fromkeys(one.detail for one in alike)
    detail = rung.detail if len(details) == 1 else f"{rung.detail} (job {jobs[0]}; the others alike)"
    threshold = "equal" if rung.threshold is None else f"{rung.threshold:.3g}"
    return rung.name, rung.title, rung.status, _worst(alike), threshold, rung.origin, f"{detail}{place(rung)}"


def _worst(alike: Sequence[Rung]) -> str:
    seen = [rung.quantity for rung in alike if rung.quantity is not None]
    return f"{max(seen, key=lambda value: math.inf if math.isnan(value) else value):.3g}" if seen else ""


def place(rung: Rung) -> str:
    """Return where a red rung is wrong, in words that follow others; empty where that is not known."""
    where = ", ".join(f"{name} {value}" for name, value in (rung.where or {}).items())
    return f" at {where}" if where else ""

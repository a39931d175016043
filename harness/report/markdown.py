"""``report.md``: table, sentences and pictures of a sweep, as a pull request or a wiki shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.compare.correctness.verdict import Check
from harness.report.pictures import read_pictures
from harness.report.sweep import table as tables
from harness.report.sweep.bandwidth_table import bandwidth_table
from harness.report.sweep.checks_table import check_tables
from harness.report.sweep.notes import explained, failures, how_sure, notes
from harness.report.sweep.sweep_report import SweepReport
from harness.report.sweep.table import Table
from harness.run.folder import write_whole


class Markdown:
    """Writes ``report.md`` into the sweep's folder."""

    def report(self, sweep: SweepReport) -> None:
        """Write it."""
        write_whole(Path(sweep.folder) / "report.md", sweep_markdown(sweep))


def sweep_markdown(sweep: SweepReport) -> str:
    """Return the report of a sweep in Markdown."""
    parts = [f"# {sweep.name}", summary(sweep)]
    parts.append(table_markdown(tables.any_table(sweep)))
    bandwidth = bandwidth_table(sweep)
    parts += ["## All-reduce by message size", table_markdown(bandwidth)] if bandwidth else []
    parts += ["\n".join(f"- {_escaped(note)}" for note in notes(sweep))]
    sure = how_sure(sweep)
    parts += ["## How sure the speeds are", "\n".join(f"- {_escaped(line)}" for line in sure)] if sure else []
    failed = failures(sweep)
    parts += ["## Failed jobs", "\n".join(f"- {_escaped(line)}" for line in failed)] if failed else []
    for check in failed_checks(sweep):
        parts += [f"## Job {check.job}: failed check", check.text]
    parts += _checks(sweep)
    # By relative paths, so that the folder can be moved or be put into a repository as a whole.
    for picture in read_pictures(Path(sweep.folder)):
        parts += [f"## {picture.title}", f"![{_escaped(picture.alt)}]({picture.png.relative_to(sweep.folder)})"]
    parts += ["## Machine", "\n".join(f"- {name}: {_escaped(value)}" for name, value in sweep.machine.items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _checks(sweep: SweepReport) -> list[str]:
    """Return every check of the verified jobs, with its bound or the reason why it was left out."""
    shown, rest = check_tables(sweep)
    parts = [part for table in shown for part in (f"### {_escaped(table.title)}", table_markdown(table.table))]
    return ["## Every check", *parts, rest] if shown else []


def summary(sweep: SweepReport) -> str:
    """Return the sweep in one sentence: how many jobs, how many of them failed or are wrong."""
    states = [tables.state(job) for job in sweep.jobs]
    counts = {"failed": states.count("failed"), "with a red verdict": states.count("red")}
    bad = [f"{count} {words}" for words, count in counts.items() if count]
    return f"{len(states)} job{'s' if len(states) > 1 else ''}, {', '.join(bad) or 'none failed'}."


def table_markdown(table: Table) -> str:
    """Return a table in Markdown; numbers are aligned to the right."""
    rule = ["---:" if right else "---" for right in table.numeric]
    rows = [[_escaped(cell) for cell in row] for row in (table.columns, *table.rows)]
    rows.insert(1, rule)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@dataclass(frozen=True)
class FailedCheck:
    """A red check as Markdown."""

    job: int
    text: str


def failed_checks(sweep: SweepReport) -> list[FailedCheck]:
    """Return for each red verdict what failed, where, and by how much."""
    return [
        FailedCheck(job.plan.job, _localised(job.correctness.failed))
        for job in sweep.jobs
        if job.correctness is not None and job.correctness.failed is not None
    ]


def _localised(check: Check) -> str:
    rows = [("check", f"{check.name} {check.title}"), *((name, str(value)) for name, value in (check.where or {}).items())]
    if check.quantity is not None:
        rows.append(("worst value", f"{check.quantity:.6g}"))
    if check.threshold is not None:
        rows.append(("may be at most", f"{check.threshold:.6g} ({check.origin})"))
    # A table needs a head in Markdown; this one is left empty.
    lines = [f"| {_escaped(name)} | {_escaped(value)} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines, "", _escaped(explained(check))]).rstrip()


def _escaped(text: str) -> str:
    """Return ``text`` so that Markdown and HTML in it stay text, on one line."""
    # The backslash is the first, as the others get one.
    for character in "\\|*_<>[]`#":
        text = text.replace(character, f"\\{character}" if character not in "<>" else {"<": "&lt;", ">": "&gt;"}[character])
    # A line break would end the row of a table or the item of a list.
    return " ".join(text.split())

"""``report.html``: the whole sweep in one file that opens from disk, on a phone, in the dark and on paper; no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from harness.report.markdown import summary
from harness.report.pictures import Picture, read_pictures
from harness.report.sweep import table as tables
from harness.report.sweep.bandwidth_table import bandwidth_table
from harness.report.sweep.checks_table import ChecksTable, check_tables
from harness.report.sweep.notes import explained, how_sure, notes
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.table import Table
from harness.run.folder import write_whole

# In the page itself, as a file that opens from disk, or from a mail, has nothing beside it.
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1d; --paper: #fff; --soft: #5b5f66; --line: #d5d8dd; --band: #f3f5f7;
        --good: #00577f; --bad: #b03a00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --paper: #17181b; --soft: #a6abb3; --line: #3a3d43; --band: #212329;
          --good: #7cc6f0; --bad: #ff9a5c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1rem; color: var(--ink); background: var(--paper);
       font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; } .soft { color: var(--soft); }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; border: 1px solid var(--line); border-radius: .4rem; }
.long { max-height: 34rem; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { position: sticky; top: 0; background: var(--band); } .num { text-align: right; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--band); }
thead th:first-child { z-index: 1; }
tbody tr:last-child td { border-bottom: 0; } .failed td, .red td { color: var(--bad); font-weight: 600; }
.checks td:last-child { white-space: normal; min-width: 24rem; }
figure { margin: 0; } figure svg { display: block; width: 100%; min-width: 34rem; height: auto; }
figcaption { color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
nav a { margin-right: 1rem; display: inline-block; } a { color: var(--good); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { body { padding: .7rem; } h1 { font-size: 1.2rem; } th, td { padding: .3rem .45rem; } }
@media print {
  :root { color-scheme: light; --ink: #000; --paper: #fff; --soft: #444; --line: #bbb; --band: #eee;
          --good: #000; --bad: #000; }
  body { max-width: none; font-size: 10pt; } nav { display: none; }
  .wide, .long { overflow: visible; max-height: none; border: 0; }
  table { font-size: 8pt; } th, td { white-space: normal; padding: .15rem .3rem; } thead { display: table-header-group; }
  th:first-child, td:first-child, thead th { position: static; } tr, section { break-inside: avoid; }
  #jobs { break-inside: auto; } h2 { break-after: avoid; } figure svg { min-width: 0; } }
"""

LONG = 25
"""A table of more rows scrolls in its own frame."""


class Html:
    """Writes ``report.html`` into the sweep's folder."""

    def report(self, sweep: SweepReport) -> None:
        """Write it."""
        write_whole(Path(sweep.folder) / "report.html", sweep_html(sweep))


def sweep_html(sweep: SweepReport) -> str:
    """Return the report of a sweep as one HTML page."""
    pictures = read_pictures(Path(sweep.folder))
    # All that comes from outside goes through escape(): a job may be called like a tag, and a traceback may hold one.
    name = sweep.name
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        # Without it a phone lays the page out for a desk, and shows it small.
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Sweep {escape(name)}</title><style>{STYLE}</style></head><body>",
        f"<header><h1>Sweep {escape(name)}</h1><p>{escape(summary(sweep))}</p>",
        f'<p class="soft">{escape(sweep.place)}</p>',
        _contents(sweep, pictures),
        "</header><main>",
        _section("jobs", "Jobs", table_html(tables.any_table(sweep)) + _sentences(notes(sweep)) + _how_sure(sweep)),
        *_bandwidth(sweep),
        *_failures(sweep),
        *_verdicts(sweep),
        *_checks(sweep),
        *(_section(picture.name, picture.title, _figure(picture)) for picture in pictures),
        "" if pictures else _without_pictures(sweep),
        _section("machine", "Machine", _pairs(sweep.machine.items())),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def table_html(table: Table) -> str:
    """Return a table; its row's class is ``ok``, ``failed`` or ``red``, which the text says as well."""
    sides = [' class="num"' if right else "" for right in table.numeric]
    # scope tells whoever has the table read aloud which heading a cell is under.
    head = "".join(f'<th scope="col"{side}>{escape(name)}</th>' for name, side in zip(table.columns, sides, strict=True))
    rows = [
        f'<tr class="{state}">{"".join(f"<td{side}>{_number(cell)}</td>" for cell, side in zip(row, sides, strict=True))}</tr>'
        for row, state in zip(table.rows, table.states, strict=True)
    ]
    # A wide table scrolls in a frame of its own, so that the page does not: on a phone its text would move out of sight.
    frame = "wide long" if len(rows) > LONG else "wide"
    body = "\n".join(rows)
    # What scrolls in its own frame must be within reach of a keyboard.
    return f'<div class="{frame}" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _number(cell: str) -> str:
    # Tables are ASCII for the sake of terminals and logs, which a page need not be.
    return escape(cell).replace("+-", "±")


def _contents(sweep: SweepReport, pictures: Sequence[Picture]) -> str:
    checks = [("every-check", "Every check")] if any(job.correctness for job in sweep.jobs) else []
    links = [("jobs", "Jobs"), *checks, *((picture.name, picture.title) for picture in pictures), ("machine", "Machine")]
    written = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in links)
    return f"<nav>{written}</nav>"


def _section(anchor: str, title: str, body: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>'


def _sentences(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _how_sure(sweep: SweepReport) -> str:
    sure = how_sure(sweep)
    return f"<details><summary>How sure the speeds are</summary>{_sentences(sure)}</details>" if sure else ""


def _bandwidth(sweep: SweepReport) -> list[str]:
    table = bandwidth_table(sweep)
    return [_section("bandwidth", "All-reduce by message size", table_html(table))] if table else []


def _failures(sweep: SweepReport) -> list[str]:
    failed = [job for job in sweep.jobs if job.result.status != "ok"]
    return [_section("failures", "Failed jobs", "".join(map(_failure, failed)))] if failed else []


def _failure(job: JobReport) -> str:
    account = f"<p><strong>Job {job.plan.job}:</strong> {escape(job.result.account)}</p>"
    fallen = [rank for rank in job.result.ranks if rank.rank == job.result.failed_rank and rank.failure is not None]
    # The rank that fell first: the tracebacks of the others tell of the peer that they lost.
    traces = [escape(rank.failure.traceback) for rank in fallen if rank.failure is not None]
    return account + "".join(f"<details><summary>Traceback</summary><pre>{trace}</pre></details>" for trace in traces)


def _verdicts(sweep: SweepReport) -> list[str]:
    """Return a section on red verdicts."""
    red = [job for job in sweep.jobs if job.correctness is not None and job.correctness.failed is not None]
    return [_section("verdicts", "Red verdicts", "".join(map(_verdict, red)))] if red else []


def _verdict(job: JobReport) -> str:
    assert job.correctness is not None and job.correctness.failed is not None
    failed = job.correctness.failed
    where = _pairs((name, str(value)) for name, value in (failed.where or {}).items())
    return (
        f"<p><strong>Job {job.plan.job}: FAILED {escape(failed.name)} ({escape(failed.title)}).</strong> "
        f"{escape(explained(failed))}</p>{where}"
    )


def _checks(sweep: SweepReport) -> list[str]:
    """Return a section with every check of the verified jobs, folded unless one is red."""
    shown, rest = check_tables(sweep)
    body = "".join(map(_checks_table, shown)) + _sentences(filter(None, [rest]))
    return [_section("every-check", "Every check", body)] if shown else []


def _checks_table(table: ChecksTable) -> str:
    # Without a script the browser folds it, and prints it as it stands: what is red must be open.
    opened = " open" if table.is_red else ""
    return f'<details class="checks"{opened}><summary>{escape(table.title)}</summary>{table_html(table.table)}</details>'


def _figure(picture: Picture) -> str:
    # Drawn into the page itself, a picture takes the page's colours, light or dark, and needs no second file.
    svg = picture.svg.read_text().replace("<svg", f'<svg role="img" aria-label="{escape(picture.alt)}"', 1)
    return f'<figure><div class="wide">{svg}</div><figcaption>{escape(picture.alt)}</figcaption></figure>'


def _without_pictures(sweep: SweepReport) -> str:
    text = f"No pictures were drawn. <code>python -m harness.compare {escape(sweep.place)}</code> draws them, without training."
    return _section("pictures", "Pictures", f"<p>{text}</p>")


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"

"""``python -m harness.compare DIR [DIR...] [--baseline DIR]``: all reports again from folders, without training or torch.

Exit status 1 where a job, or a launch for a comparison, failed or a verdict is red, or where nothing can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.compare.detection import audit_lines
from harness.errors import HarnessError, NotComparable
from harness.report.recorded import recorded_reporters
from harness.report.reporter import Reporters
from harness.report.sweep import table as tables
from harness.report.sweep.against import against, against_table
from harness.report.sweep.folder import find_sweeps, read_audit, read_sweep
from harness.report.sweep.sweep_report import SweepReport
from harness.report.terminal import Terminal, shown
from harness.run.environment import current_folder
from harness.run.folder import RunDir
from harness.run.visible import visible


def main(arguments: Sequence[str] | None = None) -> int:
    """Report each sweep, hold each against the baseline if there is one, and return the exit status."""
    asked = parser().parse_args(arguments)
    try:
        # First, as no relative path leads anywhere from a folder that has been removed.
        current_folder()
        folders = [folder for path in asked.folders for folder in find_sweeps(path)]
        baseline = read_sweep(asked.baseline) if asked.baseline else None
        if baseline is not None and all(_is_within(folder, baseline) for folder in folders):
            raise NotComparable(f"{asked.baseline} would be held against itself: --baseline takes the folder of another sweep.")
    except HarnessError as error:
        print(visible(str(error)), file=sys.stderr)
        return 1
    # Of several sweeps the baseline may be one.
    held = [(folder, None if baseline is not None and _is_within(folder, baseline) else baseline) for folder in folders]
    states = [_hold(folder, other, asked.table_only) for folder, other in held]
    # states is a list, so that every sweep was reported before one that is not well decides the status.
    return int(not all(states))


def _is_within(folder: Path, baseline: SweepReport) -> bool:
    """Return whether the baseline is the sweep in a folder, or a job of it."""
    return Path(baseline.folder).resolve().is_relative_to(folder.resolve())


def _hold(folder: Path, baseline: SweepReport | None, table_only: bool) -> bool:
    """Report one sweep, which another one's damaged files do not prevent; return True where all is well in it."""
    try:
        sweep = read_sweep(folder)
        report(sweep, table_only)
        if baseline is not None:
            _hold_against(baseline, sweep)
    # Told and counted, not raised: another sweep's report does not depend on it.
    except HarnessError as error:
        print(visible(str(error)), file=sys.stderr)
        return False
    return all(tables.is_well(job) for job in sweep.jobs)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    description = (__doc__ or "").replace("``", "")
    # An abbreviation would change its meaning, or lose it, with the next option.
    command_line = argparse.ArgumentParser(prog="python -m harness.compare", description=description, allow_abbrev=False)
    command_line.add_argument(
        "folders", nargs="+", metavar="DIR", help="folder of a sweep, or of several: outputs/DAY/TIME, outputs/DAY"
    )
    command_line.add_argument(
        "--baseline", metavar="DIR", help="folder of an earlier sweep that each DIR is held against, job by job"
    )
    command_line.add_argument("--table-only", action="store_true", help="write no files: only show the tables")
    return command_line


def report(sweep: SweepReport, table_only: bool = False) -> None:
    """Make all reports of one sweep, by the reporters that it was run with; the table is shown in any case."""
    # By this name, so that it takes the place of a recorded one, and reports after the others.
    reporters = Reporters({**({} if table_only else recorded_reporters(Path(sweep.folder))), "terminal": Terminal()})
    try:
        reporters.report(sweep)
    finally:
        reporters.close()
    for job in sweep.jobs:
        data = read_audit(RunDir(job.folder))
        if data is not None:
            print(f"\nWhat the checks catch in job {job.plan.job}:", *audit_lines(data), sep="\n")


def _hold_against(baseline: SweepReport, sweep: SweepReport) -> None:
    comparison = against(baseline, sweep)
    print(f"\n{shown(sweep.folder)} against {shown(baseline.folder)}")
    # A terminal of its own: that of the reporters has been closed, and may have been left out.
    Terminal().show(lambda short: against_table(comparison, short), comparison.notes)

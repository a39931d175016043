"""The one table of a sweep, as text in cells: the same in a terminal, in Markdown, in HTML and in TensorBoard."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from harness.compare.performance import stats
from harness.compare.performance.verdict import PerformanceVerdict
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.times import mark, samples_per_s, typical_first_step_s, typical_step_s, wall_s
from harness.run.plan import RunPlan

FIXED = ("launcher", "nprocs")
"""Settings that have a column whether or not the sweep varies them."""


class Labelled(Protocol):
    """A job before or after it ran."""

    @property
    def plan(self) -> RunPlan:
        """What it runs."""

    @property
    def label(self) -> Mapping[str, str]:
        """Column -> chosen option."""

    @property
    def overrides(self) -> Sequence[str]:
        """What was typed for it."""


NAME_LENGTH = 120
"""Longest name of a run's folder: file systems take 255 bytes."""


@dataclass(frozen=True)
class Table:
    """Columns and rows of text.

    Attributes:
        numeric: For each column, whether it is aligned to the right.
        jobs: Number of each row's job.
        states: Of each row: ``ok``, ``failed`` (the run) or ``red`` (its verdict).
    """

    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    jobs: tuple[int, ...]
    states: tuple[str, ...]

    def without(self, *names: str) -> Table:
        """Return the table without some columns."""
        kept = [i for i, name in enumerate(self.columns) if name not in names]
        return Table(
            tuple(self.columns[i] for i in kept),
            tuple(self.numeric[i] for i in kept),
            tuple(tuple(row[i] for i in kept) for row in self.rows),
            self.jobs,
            self.states,
        )

    def column(self, name: str) -> list[str]:
        """Return the cells of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


# How jobs ended


def state(job: JobReport) -> str:
    """Return ``failed`` where the run failed, ``red`` where its verdict is, else ``ok``."""
    if job.result.status != "ok":
        return "failed"
    return "red" if job.correctness is not None and job.correctness.failed is not None else "ok"


def is_well(job: JobReport) -> bool:
    """Return whether the job's own run, the verdict on it and every launch for a comparison ended well."""
    return state(job) == "ok" and all(result.status == "ok" for _, result in job.trials)


# How they are written


def grouped(value: float, decimals: int = 0) -> str:
    """Return a number with its thousands set apart by spaces."""
    return f"{value:,.{decimals}f}".replace(",", " ")


def decimals_for(values: Sequence[float]) -> int:
    """Return the decimals that give the smallest of ``values`` about three digits, at most 3."""
    finite = [abs(value) for value in values if math.isfinite(value) and value]
    # By the smallest, as all cells of a column have the same decimals and must line up.
    return max(0, min(3, 2 - math.floor(math.log10(min(finite))))) if finite else 0


def unit_of_time(seconds: Sequence[float]) -> tuple[float, str]:
    """Return (factor, unit) in which the median of ``seconds`` reads best."""
    finite = [value for value in seconds if math.isfinite(value)]
    # By the median, so that one slow job does not put all the others into a unit in which they are 0.00.
    typical = stats.median(finite) if finite else 1.0
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if typical * factor >= 1:
            return factor, unit
    return 1e6, "us"


def in_unit(values: Sequence[float], factor: float, unit: str) -> list[str]:
    """Return the cells of a column of times in one unit; empty for NaN."""
    decimals = min(2, decimals_for([value * factor for value in values]))
    return ["" if math.isnan(v) else f"{grouped(v * factor, decimals)} {unit}" for v in values]


def step_cells(jobs: Sequence[JobReport]) -> list[str]:
    """Return ``7.28 +- 0.31 ms`` for each job, in one unit."""
    steps = [typical_step_s(job) for job in jobs]
    factor, unit = unit_of_time([centre for centre, _ in steps])
    decimals = min(2, decimals_for([centre * factor for centre, _ in steps]))
    spreads = ["" if math.isnan(around) else f"{around * factor:.{decimals}f}" for _, around in steps]
    # The column is aligned to the right as a whole: spreads of one width keep the centres in line as well.
    width = max((len(text) for text in spreads), default=0)
    return [
        "" if math.isnan(centre) else _with_spread(grouped(centre * factor, decimals), around.rjust(width), unit) + mark(job)
        for job, (centre, _), around in zip(jobs, steps, spreads, strict=True)
    ]


def _first_step_cells(jobs: Sequence[JobReport]) -> list[str]:
    cells = in_unit([typical_first_step_s(job) for job in jobs], 1.0, "s")
    return [f"{cell}{mark(job, of_start=True)}" if cell else "" for job, cell in zip(jobs, cells, strict=True)]


def _with_spread(centre: str, around: str, unit: str) -> str:
    return f"{centre} +- {around} {unit}" if around.strip() else f"{centre} {unit}"


def speed_cell(job: JobReport, short: bool = False) -> str:
    """Return what is claimed of a job's speed; from one launch each, the ratio and that nothing is claimed."""
    if job.result.status != "ok":
        return _end(job)
    if job.baseline == job.plan.job:
        return "baseline"
    return ratio_cell(job.speed, short)


def start_cell(job: JobReport) -> str:
    """Return what is claimed of a job's start-up against the rival's; from one launch each, nothing."""
    if job.start is None:
        return "" if job.result.status == "ok" else _end(job)
    return job.start.label


def ratio_cell(speed: PerformanceVerdict | None, short: bool = False) -> str:
    """Return a verdict on speed for a cell."""
    if speed is None:
        return "not compared"
    if speed.pairs == 1 and speed.ratio is not None:
        rests_on = "1 clean pair" if speed.left_out else "1 launch"
        # Verdicts are ratios of times, tables tell speeds.
        return f"{1 / speed.ratio:.2f}x {'*' if short else f'({rests_on}: no claim)'}"
    return speed.label


def verified_cell(job: JobReport) -> str:
    """Return what was proved about a job's arithmetic."""
    # A red verdict is the first thing to know, also where it is what ended the run.
    if job.correctness is not None and job.correctness.failed is not None:
        return f"FAILED {job.correctness.failed.name}"
    if job.result.status != "ok":
        return f"{job.correctness.label}, then {_end(job)}" if job.correctness is not None else f"{_end(job)}, not checked"
    if job.identical_to is not None:
        return f"identical to job {job.identical_to}"
    return job.correctness.label if job.correctness is not None else "not checked"


def _end(job: JobReport) -> str:
    return "ended" if job.ended else "failed"


# The table


def swept(jobs: Sequence[Labelled]) -> list[str]:
    """Return the settings that have a column: launcher, nprocs, and what else differs between the jobs."""
    names = dict.fromkeys(name for job in jobs for name in settings(job))
    return [name for name in names if name in FIXED or len({settings(job).get(name, "") for job in jobs}) > 1]


def settings(job: Labelled) -> Mapping[str, str]:
    """Return a job's chosen options, and what was typed for it, as column -> value."""
    # + and ~ are Hydra's signs for adding and taking away; the setting's name comes after them.
    typed = dict(override.lstrip("+~").split("=", 1) for override in job.overrides if "=" in override)
    # Hydra's own settings say where files go or how a job is launched, and differ without meaning.
    named = {**job.label, **{name: value for name, value in typed.items() if not name.startswith("hydra")}}
    # nprocs=-1 stands for a number that the plan knows.
    return {**named, "launcher": named.get("launcher", job.plan.method), "nprocs": str(job.plan.nprocs)}


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each leaf."""
    for name, value in values.items():
        # An empty mapping is a leaf: it would else vanish.
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def run_name(job: Labelled, jobs: Sequence[Labelled]) -> str:
    """Return what was swept, as a folder's name on any file system: ``launcher=spawn,nprocs=2``."""
    values = settings(job)
    options = ",".join(f"{name}={values[name]}" for name in swept(jobs) if values.get(name))
    # Neither a separator nor what a shell or another file system takes for its own; a leading dot would hide the folder.
    return re.sub(r"[^\w=,.+-]+", "_", options)[:NAME_LENGTH].strip("._") or "job"


def sweep_table(sweep: SweepReport, short: bool = False) -> Table:
    """Return the table of a sweep of the harness's own training.

    Args:
        short: Whether cells are cut down to what fits 80 columns.
    """
    jobs = sweep.jobs
    names = swept(jobs)
    columns: list[tuple[str, bool, Sequence[str]]] = [("job", True, [str(job.plan.job) for job in jobs])]
    columns += [(name, _is_numeric(cells), cells) for name in names if (cells := [settings(j).get(name, "") for j in jobs])]
    rates = [samples_per_s(job) for job in jobs]
    # A rate of a hundred or more has three digits before its point.
    places = 0 if max((r for r in rates if not math.isnan(r)), default=0) >= 100 else 1
    columns += [
        ("first step", True, _first_step_cells(jobs)),
        ("start", True, [start_cell(job) for job in jobs]),
        ("step", True, step_cells(jobs)),
        ("samples/s", True, ["" if math.isnan(rate) else grouped(rate, places) for rate in rates]),
        ("speed", True, [speed_cell(job, short) for job in jobs]),
        ("verified", False, [verified_cell(job) for job in jobs]),
    ]
    empty = {"start": all(job.start is None for job in jobs), "speed": all(job.speed is None for job in jobs)}
    return _table(columns, jobs).without(*(name for name, is_empty in empty.items() if is_empty))


def any_table(sweep: SweepReport) -> Table:
    """Return the table that suits what the sweep ran."""
    return sweep_table(sweep) if any(job.plan.train for job in sweep.jobs) else foreign_table(sweep)


def foreign_table(sweep: SweepReport) -> Table:
    """Return the short table of a sweep of somebody else's app."""
    jobs = sweep.jobs
    extra = [name for name in swept(jobs) if name not in FIXED]
    columns: list[tuple[str, bool, Sequence[str]]] = [("job", True, [str(job.plan.job) for job in jobs])]
    columns += [(name, _is_numeric(cells), cells) for name in extra if (cells := [settings(j).get(name, "") for j in jobs])]
    columns += [
        ("ranks", True, [str(job.plan.nprocs) for job in jobs]),
        ("status", False, [job.result.status for job in jobs]),
        ("time", True, in_unit([wall_s(job) for job in jobs], 1.0, "s")),
    ]
    return _table(columns, jobs)


def _table(columns: Sequence[tuple[str, bool, Sequence[str]]], jobs: Sequence[JobReport]) -> Table:
    names, numeric, cells = zip(*columns, strict=True)
    # Beside the cells, so that each reporter can colour a row without reading its words.
    states = tuple(state(job) for job in jobs)
    return Table(names, numeric, tuple(zip(*cells, strict=True)), tuple(job.plan.job for job in jobs), states)


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(_is_number(cell) for cell in cells if cell)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# Its columns, turned round


def grouped_by_cell(table: Table, name: str) -> list[tuple[str, str]]:
    """Return a column turned round: each different cell with the jobs that have it, such as ``("not checked", "0-3, 5")``."""
    groups: dict[str, list[int]] = {}
    for job, cell in zip(table.jobs, table.column(name), strict=True):
        groups.setdefault(cell, []).append(job)
    return [(cell, ranges(jobs)) for cell, jobs in groups.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Return ``0-3, 5`` for 0, 1, 2, 3, 5."""
    # Numbers that follow each other have the same distance from their place in the sorted list.
    key: Callable[[tuple[int, int]], int] = lambda pair: pair[1] - pair[0]  # noqa: E731
    runs = [[number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), key)]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

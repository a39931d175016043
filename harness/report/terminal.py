"""What the terminal shows while a sweep runs, and the table at its end."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from harness.report.logged import Logged
from harness.report.sweep import table as tables
from harness.report.sweep.bandwidth_table import RECIPE, bandwidth_table
from harness.report.sweep.notes import failures, notes
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.text import Line, both_ends, flow, paragraph, table_lines
from harness.run.launch_methods import traits_of
from harness.run.record import ratio, samples_of
from harness.run.visible import visible

if TYPE_CHECKING:
    from harness.run.job import Job
    from harness.run.record import RunResult

STYLES = {"head": "bold", "ok": "", "failed": "red", "red": "bold red", "note": "dim"}
RECENT_STEPS = 10
"""The rate that is shown while a job runs is that of so many last steps."""


class Terminal:
    """Shows a line when a job starts, its progress, and one table at the end.

    Args:
        console: Where to; stdout unless told. Colours and the bar are for terminals, ``NO_COLOR`` is respected.
        errors: Where failures go to; stderr unless told.
    """

    def __init__(self, console: Console | None = None, errors: Console | None = None) -> None:
        # Text of users is shown as it is: [brackets] are no markup, :colons: no emoji, and numbers get no colours.
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._errors = errors or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._jobs: Sequence[Job] = ()
        self._progress: _Progress | None = None

    def begin(self, folder: str, jobs: Sequence[Job]) -> None:
        """Show what all jobs have in common, and the sweep's folder."""
        self._jobs = jobs
        trained = [job for job in jobs if job.plan.train is not None]
        if trained:
            for line in both_ends("  ".join(headline(trained)), shown(folder), self._console.width):
                self._line(line)

    def started(self, job: Job) -> None:
        """Show which job it is, where there are more."""
        if job.plan.train is None:
            return
        if len(self._jobs) > 1:
            names = [f"{name}={tables.settings(job)[name]}" for name in tables.swept(self._jobs)]
            for line in flow([f"job {job.plan.job}", *names], self._console.width):
                self._line(line)
        self._progress = _Progress(self._console, job)

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Show the progress, evaluations, and log records of other ranks word for word."""
        if event["event"] == "log":
            self.output(event["text"])
        elif self._progress is not None:
            self._progress.take(rank, event)

    def output(self, line: str) -> None:
        """Show a line of a rank as it is, colours included."""
        if self._console.is_terminal and "\x1b" in line:
            self._console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            self._line(line)

    def ended(self, job: Job, result: RunResult) -> None:
        """Show at once that a job failed."""
        # The bar goes first, or the message would be printed into it.
        self.close()
        if result.account:
            failed = result.status != "ok"
            name = f"job {job.plan.job} " if len(self._jobs) > 1 else ""
            style = STYLES["failed"] if failed else STYLES["note"]
            for line in traceback_of_another(result):
                self._errors.print(Text(line), soft_wrap=True)
            self._print(self._errors, f"{name}{'failed' if failed else 'note'}: {result.account}", style)

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def report(self, sweep: SweepReport) -> None:
        """Show the table and where more is to be had."""
        if self._jobs:  # a sweeper may bring jobs in batches, each with its own table
            # Only this batch's rows, as those of the others have been shown.
            numbers = {job.plan.job for job in self._jobs}
            sweep = dataclasses.replace(sweep, jobs=tuple(job for job in sweep.jobs if job.plan.job in numbers))
        # The failure of a single job has just been shown, unless this is a report of an old sweep.
        for text, state in report_lines(sweep, self._console.width, len(sweep.jobs) > 1 or not self._jobs):
            self._line(text, STYLES[state])

    def show(self, table: Callable[[bool], tables.Table], sentences: Sequence[str]) -> None:
        """Show a table, and sentences beside it."""
        lines = table_lines(table, self._console.width)
        lines += [(line, "note") for sentence in sentences for line in paragraph(sentence, self._console.width)]
        for text, state in lines:
            self._line(text, STYLES[state])

    def _line(self, text: str, style: str = "") -> None:
        # soft_wrap: rich would break lines at the width that it takes a pipe to have, and paths could not be copied.
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _print(self, console: Console, text: str, style: str) -> None:
        # Where nobody reads it on a screen, a message is one line, to be found by grep.
        lines = paragraph(text, console.width) if console.is_terminal else text.splitlines()
        for line in lines:
            console.print(Text(line, style=style), soft_wrap=True)


def traceback_of_another(result: RunResult) -> list[str]:
    """Return the traceback of the rank that failed first, where nobody has seen it: rank 0's output is shown as it comes."""
    failures = [rank.failure for rank in result.ranks if rank.rank == result.failed_rank and rank.failure is not None]
    # A mistake of the user's has a message that says what to type, and its traceback would only hide that.
    if result.failed_rank in (None, 0) or not failures or failures[0].mistake:
        return []
    return [f"[rank {result.failed_rank}] {line}" for line in failures[0].traceback.rstrip().splitlines()]


def headline(jobs: Sequence[Job]) -> list[str]:
    """Return what jobs of the harness's own training have in common, in words."""
    facts = [_facts_of(job) for job in jobs]
    # In the first job's order. What jobs differ in has a column in the table.
    return [word for word in facts[0] if all(word in other for other in facts)]


def _facts_of(job: Job) -> list[str]:
    plan, train = job.plan, job.plan.train
    assert train is not None
    length = f"{train.epochs} epochs" if train.steps is None else f"{train.steps} steps"
    trained = [f"global batch {train.global_batch_size}", length] if train.recipe.get("_target_") != RECIPE else []
    reason = f" ({plan.backend_reason})" if plan.backend_reason.startswith("auto") else ""
    recipe = job.label.get("recipe") or str(train.recipe.get("_target_", "")).rpartition(".")[2]
    resumed = [f"resumes {train.resume}"] if train.resume else []
    return [
        recipe,
        *trained,
        f"seed {train.seed}",
        f"{plan.backend}{reason}",
        *resumed,
    ]


def report_lines(sweep: SweepReport, width: int, name_failures: bool = True) -> list[Line]:
    """Return all that is said at the end of a sweep, in lines that fit ``width``."""
    if not any(job.plan.train for job in sweep.jobs):
        return table_lines(lambda short: tables.foreign_table(sweep), width) if len(sweep.jobs) > 1 else []
    lines: list[Line] = [("", "ok"), *table_lines(lambda short: tables.sweep_table(sweep, short), width)]
    bandwidth = bandwidth_table(sweep)
    lines += [("", "ok"), *table_lines(lambda short: bandwidth, width)] if bandwidth else []
    failed = failures(sweep) if name_failures else []
    for sentences, state in ((notes(sweep), "note"), (failed, "failed")):
        lines += [(line, state) for sentence in sentences for line in paragraph(sentence, width)]
    return [*lines, *((line, "ok") for line in closing(sweep, width))]


def closing(sweep: SweepReport, width: int) -> list[str]:
    """Return how to see more: on one line where it fits, else a line each, else with what is to be typed on its own."""
    folder = shown(sweep.folder)
    ways = [("Repeat without training:", f"python -m harness.compare {shlex.quote(folder)}")]
    ways += _weights(sweep)
    if (Path(sweep.folder) / "report.html").exists():
        ways.append(("Report:", f"{folder}/report.html"))
    if any(_has_events(job) for job in sweep.jobs):
        ways.append(("Look:", f"tensorboard --logdir {shlex.quote(_log_dir(folder))}"))
    # Commands are copied whole, so that one is put on a line of its own rather than broken.
    row = "      ".join(" ".join(way) for way in ways)
    return [row] if len(row) <= width else [line for label, typed in ways for line in _way(label, typed, width)]


def _weights(sweep: SweepReport) -> list[tuple[str, str]]:
    """Return where the trained weights are: the file of a single job, or the name that they have in each job's folder."""
    left = [(job, str(name)) for job in sweep.jobs if (name := _weights_of(job))]
    if len(sweep.jobs) == 1 and left:
        return [("Weights:", shown(Path(left[0][0].folder, left[0][1])))]
    # A path for each of many jobs would fill the screen, and they differ in the folder alone.
    names = dict.fromkeys(name for _, name in left)
    return [("Weights:", f"{' or '.join(names)} in each job's folder")] if names else []


def _weights_of(job: JobReport) -> str:
    return str(job.result.ranks[0].facts.get("weights", "")) if job.result.ranks else ""


def _way(label: str, typed: str, width: int) -> list[str]:
    return [f"{label} {typed}"] if len(label) + 1 + len(typed) <= width else [label, f"  {typed}"]


def _has_events(job: JobReport) -> bool:
    # By the files and not by the settings: an old sweep may have been run with other reporters.
    return any(Path(job.folder).glob("*/events.out.tfevents.*"))


def _log_dir(folder: str) -> str:
    """Return the first part of a relative folder, which holds all sweeps; an absolute one is that of the sweep."""
    return folder if os.path.isabs(folder) or folder == "." else Path(folder).parts[0]


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as short as it can be typed from here."""
    relative = os.path.relpath(path)
    # A path that leads up by dots is harder to read than one from the root.
    return visible(str(path) if relative.startswith("..") else relative)


class _Progress:
    """The steps of one job that all of its ranks have done: a bar on a terminal, else a line every ``log_every`` steps."""

    def __init__(self, console: Console, job: Job) -> None:
        assert job.plan.train is not None
        self._console = console
        self._train = job.plan.train
        self._nprocs = job.plan.nprocs
        self._total = job.plan.train.steps
        self._parts: dict[int, list[Mapping[str, Any]]] = {}
        self._last = -1
        self._held: list[Mapping[str, Any]] = []
        self._logged = Logged()
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        # An inline rank shares this terminal, perhaps with a debugger in it.
        self._bar = (
            _Bar(console, self._total) if console.is_terminal and not traits_of(job.plan.method).shows_own_output else None
        )

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take in an event of a rank."""
        if event["event"] == "step":
            parts = self._parts.setdefault(event["step"], [])
            parts.append(event)
            if len(parts) == self._nprocs:
                self._step(self._parts.pop(event["step"]))
        # Of a training by epochs only the ranks know how many steps that is.
        elif event["event"] == "facts" and "num_steps" in event:
            self._total = event["num_steps"]
        elif event["event"] == "trial" and rank == 0:
            outcome = (f"red at {event['fired']}" if event["fired"] else "green") if event["ran"] else "does not apply"
            self._say(f"audit {event['number']} of {event['total']}  {event['fault'].replace('_', ' ')}  {outcome}")
        elif event["event"] == "scalar":
            self._logged.take(event)
        elif event["event"] == "evaluation" and rank == 0:
            self._held.append(event)
            self._tell_evaluations(self._last)

    def _tell_evaluations(self, last: int | None) -> None:
        """Show the evaluations up to a step, all where it is None: rank 0 tells of one before others have told of the step."""
        while self._held and (last is None or self._held[0]["step"] <= last):
            event = self._held.pop(0)
            means = {name: ratio(*pair) for name, pair in event["metrics"].items()}
            numbers = "  ".join(f"{name} {mean:.4g}" for name, mean in means.items())
            self._say(f"evaluation after step {event['step'] + 1}  {numbers}")

    def _step(self, parts: Sequence[Mapping[str, Any]]) -> None:
        done = parts[0]["step"] + 1
        samples = samples_of((part.get("samples") for part in parts), self._train.global_batch_size)
        # The slowest rank's time: all others wait for it in the step's reduction.
        self._recent.append((samples, max(part["seconds"] for part in parts)))
        mean = ratio(sum(part["loss_sum"] for part in parts), sum(part["count"] for part in parts))
        loss = f"{mean:.4f}{', left out' if any(part.get('skipped') for part in parts) else ''}"
        rate = tables.grouped(ratio(sum(count for count, _ in self._recent), sum(seconds for _, seconds in self._recent)))
        if self._bar is not None:
            self._bar.show(done, self._total, loss, rate)
        # The last step always, so that the log ends with the loss at which the training ended.
        elif done % self._train.log_every == 0 or done == self._total:
            of = f" of {self._total}" if self._total else ""
            place = str(done).rjust(len(str(self._total or "")))
            latest = {name: value for _, values in self._logged.before(done) for name, value in values.items()}
            logged = "".join(f"  {name} {value:.4g}" for name, value in latest.items())
            self._say(f"step {place}{of}  loss {loss}{logged}  {rate} samples/s")
        self._last = parts[0]["step"]
        self._tell_evaluations(self._last)

    def _say(self, text: str) -> None:
        for line in paragraph(text, self._console.width):
            self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Take the bar away, and show what is still held."""
        self._tell_evaluations(None)
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """Rich's progress bar, drawn when there is something new: a thread of its own would forbid ranks forked from here."""

    def __init__(self, console: Console, total: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} samples/s"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
            # rich would else replace sys.stdout and sys.stderr of the whole process.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=total, loss="-", rate="-")
        self._drawn = 0.0
        self._progress.start()

    def show(self, done: int, total: int | None, loss: str, rate: str) -> None:
        """Draw it, at most ten times a second."""
        self._progress.update(self._task, completed=done, total=total, loss=loss, rate=rate)
        now = self._progress.get_time()
        # Steps of a millisecond would else have the parent draw on a core that ranks want.
        if now - self._drawn > 0.1 or done == total:
            self._drawn = now
            self._progress.refresh()

    def close(self) -> None:
        """Take it away."""
        self._progress.stop()

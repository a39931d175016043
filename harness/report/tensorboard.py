"""TensorBoard: one run per job, live while it runs, and one for the sweep with the verdicts and pictures.

Event files are a view of the records: ``python -m harness.compare`` writes the same ones again. The step of an event is
that of its record, counted from 0; its time is when the slowest rank ended it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.struct_pb2 import Value  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

from harness.report.event_file import EventFile, clear
from harness.report.logged import Logged
from harness.report.markdown import failed_checks, table_markdown
from harness.report.pictures import read_pictures
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.checks_table import check_tables
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.table import Labelled
from harness.run.record import RunResult, Step, ratio, samples_of

if TYPE_CHECKING:
    from harness.run.job import Job

OVERLAID = {"loss/train": "loss", "perf/step_ms": "step time, ms", "perf/samples_per_s": "samples per second"}
"""Series that have a chart per recipe and number of ranks, with all launchers in it -> the chart's title."""

RECORDED_ONLY = {"comm_exposed_s": "perf/comm_exposed_ms", "delay_s": "perf/run_delay_ms"}
"""Field of a step, where it was recorded -> tag; the largest over the ranks, in milliseconds."""


NOT_SHOWN = ("recipe._target_", "reference")
"""Settings that are no hyperparameters."""


class TensorBoard:
    """Writes ``JOB/<what was swept>/events.out.tfevents.*`` while the job runs, and the sweep's own beside the jobs."""

    def __init__(self) -> None:
        self._folder = Path()
        self._jobs: Sequence[Job] = ()
        self._live: dict[int, _JobEvents] = {}
        self._now: _JobEvents | None = None

    def begin(self, folder: str, jobs: Sequence[Job]) -> None:
        """Lay out the charts, so that TensorBoard has them while the jobs run."""
        self._folder, self._jobs = Path(folder), jobs
        if any(job.plan.train for job in jobs):
            # Old files would be read beside the new one, and two layouts or verdicts be shown.
            clear(self._folder)
            _write_layout(EventFile(self._folder, time.time()), jobs, time.time())

    def started(self, job: Job) -> None:
        """Open the job's run."""
        if job.plan.train is not None:
            # Records are by CLOCK_MONOTONIC, which starts anew with the machine; TensorBoard shows times of day.
            offset = time.time() - time.monotonic()
            self._now = _JobEvents(job.run.path, job, self._jobs, offset, time.time())
            self._live[job.plan.job] = self._now

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Write a step once all ranks have done it, and evaluations."""
        if self._now is not None:
            self._now.take(rank, event)

    def ended(self, job: Job, result: RunResult) -> None:
        """Write what the job came to."""
        if self._now is not None:
            self._now.end(JobReport(job.plan, str(job.run.path), result, job.label, tuple(job.overrides)))
            self._now = None

    def report(self, sweep: SweepReport) -> None:
        """Write the verdicts; and all of a job that did not run just now."""
        for job in sweep.jobs:
            if job.plan.train is not None:
                # A job that ran just now has its file: written again it would show twice in a TensorBoard that is open.
                live = self._live.get(job.plan.job) or _replayed(job, sweep)
                live.verdict(job)
        if any(job.plan.train for job in sweep.jobs):
            _write_sweep(sweep)


class _JobEvents:
    """The run of one job."""

    def __init__(self, folder: Path, job: Labelled, jobs: Sequence[Labelled], offset: float, began: float) -> None:
        assert job.plan.train is not None
        where = folder / tables.run_name(job, jobs)
        clear(where)
        self._file = EventFile(where, began)
        self._train = job.plan.train
        self._nprocs = job.plan.nprocs
        self._offset = offset
        self._overlay = overlay_name(job)
        self._parts: dict[int, list[Mapping[str, Any]]] = {}
        self._logged = Logged()
        self._last = began
        self._step = 0
        self._hparams("session_start_info", SessionStartInfo(hparams=hparams(job), start_time_secs=began), began)

    def take(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take in an event of a rank."""
        if event["event"] == "step":
            parts = self._parts.setdefault(event["step"], [])
            parts.append(event)
            # Only then: the loss is over all ranks, and a step lasts as long as on the slowest.
            if len(parts) == self._nprocs:
                self.step(self._parts.pop(event["step"]))
        elif event["event"] == "scalar":
            self._logged.take(event)
        # All ranks tell of the same sums, which were reduced.
        elif event["event"] == "evaluation" and rank == 0:
            self.evaluation(event["step"], event["metrics"])

    def step(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Write one step of all ranks."""
        seconds = max(part["seconds"] for part in parts)
        values = {
            "loss/train": ratio(sum(part["loss_sum"] for part in parts), sum(part["count"] for part in parts)),
            "perf/step_ms": seconds * 1e3,
            "perf/samples_per_s": ratio(samples_of((p.get("samples") for p in parts), self._train.global_batch_size), seconds),
            # Of one rank: that all have the same is the matter of check R5, not of a chart.
            "lr": parts[0]["lr"],
        }
        for name, tag in RECORDED_ONLY.items():
            recorded = [part[name] for part in parts if part.get(name) is not None]
            values |= {tag: max(recorded) * 1e3} if recorded else {}
        # A second time under a tag of their own, as the custom charts join series by tag, and each job is a run of its own.
        values |= {overlay_tag(self._overlay, tag): values[tag] for tag in OVERLAID}
        # What is logged in an evaluation comes after its step.
        self.logged(before=parts[0]["step"])
        self._last, self._step = max(part["t"] for part in parts) + self._offset, parts[0]["step"]
        self._file.scalars(values, self._step, self._last)

    def logged(self, before: float = math.inf) -> None:
        """Write what the user's code has logged at steps that all ranks have behind them."""
        for step, values in self._logged.before(before):
            self._file.scalars(values, step, self._last)

    def evaluation(self, step: int, metrics: Mapping[str, Sequence[float]]) -> None:
        """Write one evaluation, which follows its step."""
        self._file.scalars({f"{name}/eval": ratio(*pair) for name, pair in metrics.items()}, step, self._last)

    def end(self, job: JobReport) -> None:
        """Write the job's last numbers and how it ended."""
        self.logged()
        self._file.scalars(final_metrics(job), self._step, self._last)
        status = STATUS_SUCCESS if job.result.status == "ok" else STATUS_FAILURE
        self._hparams("session_end_info", SessionEndInfo(status=status, end_time_secs=self._last), self._last)

    def verdict(self, job: JobReport) -> None:
        """Write whether the job's arithmetic was found right; nothing where it was not checked."""
        verified = verdict_metric(job)
        if verified is not None:
            self._file.scalars({"final/correct": verified}, self._step, self._last)

    def _hparams(self, name: str, info: SessionStartInfo | SessionEndInfo, wall_time: float) -> None:
        content = HParamsPluginData(version=0, **{name: info})
        self._file.plugin(f"_hparams_/{name}", "hparams", wall_time, content=content.SerializeToString())


def _replayed(job: JobReport, sweep: SweepReport) -> _JobEvents:
    """Write a job's run from its records."""
    offset = sweep.clock_offset_s or 0.0
    # Without the parent's marks, of a run that was ended, the earliest of any rank has to do.
    began = offset + job.result.marks.get("called", _first_time(job.result))
    events = _JobEvents(Path(job.folder), job, sweep.jobs, offset, began)
    for scalar in (scalar for rank in job.result.ranks for scalar in rank.scalars):
        # All of them first: a step writes what was logged before it.
        events.take(0, {"event": "scalar", **vars(scalar)})
    evaluations = {evaluation.step: evaluation for evaluation in (job.result.ranks[0].evaluations if job.result.ranks else ())}
    # Steps that not all ranks came to end the run, as they do while it is live.
    for parts in zip(*(rank.steps for rank in job.result.ranks), strict=False):
        events.step([_as_event(step) for step in parts])
        if parts[0].step in evaluations:
            events.evaluation(parts[0].step, evaluations[parts[0].step].metrics)
    events.end(job)
    return events


def _as_event(step: Step) -> dict[str, Any]:
    return dict(vars(step))


def _first_time(result: RunResult) -> float:
    return min((time for rank in result.ranks for time in rank.marks.values()), default=0.0)


# Names


def overlay_name(job: Labelled) -> str:
    """Return recipe and rank count, whose launchers share a chart."""
    assert job.plan.train is not None
    recipe = job.label.get("recipe") or str(job.plan.train.recipe.get("_target_", "recipe")).rpartition(".")[2]
    return f"{recipe} on {job.plan.nprocs} rank{'s' if job.plan.nprocs > 1 else ''}"


def overlay_tag(name: str, tag: str) -> str:
    """Return the tag of a series among those of its recipe and rank count; the charts find no tag with brackets in it."""
    return f"overlay/{re.sub(r'[^A-Za-z0-9_ ]', '_', name)}/{tag.rpartition('/')[2]}"


# HParams


def hparams(job: Labelled) -> dict[str, Value]:
    """Return all settings of a job as HParams shows them: nested ones by dotted names, lists and None as text."""
    assert job.plan.train is not None
    started = {"backend": job.plan.backend, "threads": job.plan.threads, "device": job.plan.device}
    planned = {**dataclasses.asdict(job.plan.train), **started}
    # What the plan knows is shown as the plan has it: nprocs=-1 or lr=auto are no values to sort by.
    typed = {name: _number_or_text(text) for name, text in tables.settings(job).items() if name not in planned}
    return {name: _value(value) for name, value in tables.flattened({**typed, **planned}) if name not in NOT_SHOWN}


def _number_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _value(value: Any) -> Value:
    # Before numbers, as bool is a kind of int.
    if isinstance(value, bool):
        return Value(bool_value=value)
    # protobuf refuses to write a Value that is NaN or infinite as JSON, by which HParams reads it; text it shows.
    if isinstance(value, int | float) and math.isfinite(value):
        return Value(number_value=value)
    return Value(string_value=value if isinstance(value, str) else json.dumps(value, default=str))


def final_metrics(job: JobReport) -> dict[str, float]:
    """Return what a job came to, without what is not known; HParams shows the first five metrics by name."""
    losses = job.result.losses()
    metrics = {
        "final/first_step_s": times.typical_first_step_s(job),
        "final/step_ms": times.step_s(job) * 1e3,
        "final/samples_per_s": times.samples_per_s(job),
        "final/loss": losses[-1] if losses else math.nan,
    }
    # NaN would be a point in a chart that is not there, and a cell that cannot be sorted.
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def verdict_metric(job: JobReport) -> float | None:
    """Return 1 for arithmetic that was found right, 0 for wrong, None where nothing was checked."""
    # First, as a red job may have ended well too.
    if tables.state(job) == "red":
        return 0.0
    if job.result.status == "ok" and (job.identical_to is not None or (job.correctness and job.correctness.num_checked)):
        return 1.0
    return None


# The sweep's own run


def _write_sweep(sweep: SweepReport) -> None:
    now = time.time()
    trained = [job for job in sweep.jobs if job.plan.train is not None]
    clear(Path(sweep.folder))
    file = EventFile(Path(sweep.folder), now)
    _write_layout(file, trained, now)
    file.text("verdicts", table_markdown(tables.sweep_table(sweep)), now)
    for sentence in failed_checks(sweep):
        file.text(f"failed checks/job {sentence.job}", sentence.text, now)
    for table in check_tables(sweep)[0]:
        file.text(f"every check/{table.title.partition(':')[0]}", table_markdown(table.table), now)
    for picture in read_pictures(Path(sweep.folder)):
        png = picture.png.read_bytes()
        file.picture(f"pictures/{picture.title}", png, png_size(png), now)


def png_size(png: bytes) -> tuple[int, int]:
    """Return width and height in pixels, from the header of a PNG file."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _write_layout(file: EventFile, jobs: Iterable[Labelled], wall_time: float) -> None:
    names = dict.fromkeys(overlay_name(job) for job in jobs if job.plan.train is not None)
    categories = [Category(title=name, chart=[_chart(name, *pair) for pair in OVERLAID.items()]) for name in names]
    layout = Layout(version=0, category=categories)
    file.plugin("custom_scalars__config__", "custom_scalars", wall_time, tensor=layout.SerializeToString())


def _chart(name: str, tag: str, title: str) -> Chart:
    # Anchored, because the tag is a regular expression, and one recipe's name may begin with another's.
    return Chart(title=title, multiline=MultilineChartContent(tag=[f"^{overlay_tag(name, tag)}$"]))

"""One sweep against an earlier one: each job against the job of the same settings. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.compare.performance.launches import Launch
from harness.compare.performance.verdict import PerformanceVerdict, compare
from harness.compare.plans import OBSERVING
from harness.errors import NotComparable
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.build import digests
from harness.report.sweep.notes import disturbed, untold
from harness.report.sweep.samples import launch_of, trials_of
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.table import Table


@dataclass(frozen=True)
class Pair:
    """A job, the one it is held against, and what that shows."""

    job: JobReport
    before: JobReport
    speed: PerformanceVerdict | None
    arithmetic: str


@dataclass(frozen=True)
class Against:
    """A sweep against its baseline; ``notes`` say what could not be compared, and in what the machines differ."""

    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]


def against(baseline: SweepReport, sweep: SweepReport) -> Against:
    """Return each job of ``sweep`` with its counterpart in ``baseline``.

    Raises:
        NotComparable: No job has one; the message says for each what differs.
    """
    earlier = [job for job in baseline.jobs if _has_steps(job)]
    pairs: list[Pair] = []
    refused: list[str] = []
    for job in sweep.jobs:
        # The first that fits: any other of the same settings would do as well.
        match = next((candidate for candidate in earlier if _conditions(candidate) == _conditions(job)), None)
        if match is None:
            refused.append(_refusal(job, earlier, baseline))
        elif _has_steps(job):
            pairs.append(_pair(job, match, sweep, baseline))
        else:
            refused.append(f"job {job.plan.job} cannot be compared: it took no step that counts.")
    if not pairs:
        raise NotComparable("\n".join(refused))
    notes = [*refused, *machine_notes(baseline, sweep), *_notes(pairs)]
    return Against(tuple(pairs), tuple(notes))


def _has_steps(job: JobReport) -> bool:
    return job.plan.train is not None and job.result.status == "ok" and bool(times.step_times(job))


def _conditions(job: JobReport) -> dict[str, Any]:
    """Return the settings that must be equal, by the name that the user knows: all but those of watching."""
    plan = job.plan
    trained = dataclasses.asdict(plan.train) if plan.train else {}
    started = {"launcher": tables.settings(job)["launcher"], "nprocs": plan.nprocs, "threads": plan.threads}
    machine = {"backend": plan.backend, "device": plan.device}
    return {**started, **machine, **{name: value for name, value in trained.items() if name not in OBSERVING}}


def _refusal(job: JobReport, earlier: list[JobReport], baseline: SweepReport) -> str:
    """Return why a job has no counterpart: what differs from the one that is most like it."""
    if not earlier:
        return f"job {job.plan.job} cannot be compared: no job of {baseline.folder} took a step that counts."
    differing = {candidate.plan.job: _differences(_conditions(job), _conditions(candidate)) for candidate in earlier}
    # Against the job that is most like it the message is shortest, and most likely names what was meant to be equal.
    nearest = min(differing, key=lambda number: len(differing[number]))
    return f"job {job.plan.job} cannot be compared with job {nearest} of the baseline: {'; '.join(differing[nearest])}."


def _differences(now: Mapping[str, Any], before: Mapping[str, Any], prefix: str = "") -> list[str]:
    differing = []
    for name in dict.fromkeys([*now, *before]):
        value, earlier = now.get(name), before.get(name)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            differing += _differences(value, earlier, f"{prefix}{name}.")
        elif value != earlier:
            differing.append(f"{prefix}{name} is {value} against {earlier}")
    return differing


def _pair(job: JobReport, before: JobReport, sweep: SweepReport, baseline: SweepReport) -> Pair:
    # Both or neither: the median of many launches against a single one would compare two kinds of number.
    several = bool(job.trials and before.trials)
    now, then = _launches(job, sweep, several), _launches(before, baseline, several)
    try:
        # Both jobs may have the same number, and a sentence must tell them apart.
        speed = compare([dataclasses.replace(launch, arm="baseline") for launch in then], now)
    except NotComparable:
        speed = None
    if not several:
        # Their own runs were compared, and are what the table shows.
        job, before = dataclasses.replace(job, trials=()), dataclasses.replace(before, trials=())
    return Pair(job, before, speed, _arithmetic(job, before))


def _launches(job: JobReport, sweep: SweepReport, several: bool) -> list[Launch]:
    # The machine is compared in words, by machine_notes.
    machine = {"cores": sweep.machine.get("cores", "")}
    return trials_of(job, machine) if several else [launch_of(job, machine)]


def _arithmetic(job: JobReport, before: JobReport) -> str:
    digests_now, digests_before = digests(job), digests(before)
    # Two empty lists are equal as well, and say nothing.
    if digests_now and digests_now == digests_before:
        return "identical"
    # Other bits may be rounding or another training: the losses show how far apart they are.
    last = [each.result.losses()[-1] for each in (job, before)]
    if not (digests_now and digests_before):
        return "no digests"
    return f"differs, last loss {last[0]:.4g} against {last[1]:.4g}"


def machine_notes(baseline: SweepReport, sweep: SweepReport) -> list[str]:
    """Return in what the machines differ; times then say as much of the machines as of the code."""
    differing = _differences(sweep.machine, baseline.machine)
    if not differing:
        return []
    return [f"The sweeps ran on machines that differ, and so may their times and their last bits: {'; '.join(differing)}."]


def _notes(pairs: list[Pair]) -> list[str]:
    # Notes are made from a job's own speed; the one against the earlier sweep takes its place.
    jobs = [dataclasses.replace(pair.job, speed=pair.speed) for pair in pairs]
    busy = disturbed(jobs) + untold(jobs)
    counts = {pair.speed.pairs for pair in pairs if pair.speed is not None}
    single = ["* No claim of speed: one launch each says nothing beyond its own spread."] if 1 in counts else []
    several = (
        ["The sweeps ran at different times: what else the machine did then is part of the ratio."]
        if max(counts, default=0) > 1
        else []
    )
    return busy + single + several


def against_table(comparison: Against, short: bool = False) -> Table:
    """Return a row for each pair."""
    jobs = [pair.job for pair in comparison.pairs]
    before = [pair.before for pair in comparison.pairs]
    # In one call, so that both columns have one unit and the same decimals.
    cells = tables.step_cells([*before, *jobs])
    rows = []
    for number, pair in enumerate(comparison.pairs):
        values = tables.settings(pair.job)
        speed = tables.ratio_cell(pair.speed, short)
        named = (str(pair.job.plan.job), str(pair.before.plan.job), values["launcher"], values["nprocs"])
        rows.append((*named, cells[number], cells[len(jobs) + number], speed, pair.arithmetic))
    columns = ("job", "before", "launcher", "nprocs", "step before", "step now", "speed", "arithmetic")
    numeric = (True, True, False, True, True, True, True, False)
    states = tuple("ok" for _ in rows)
    return Table(columns, numeric, tuple(rows), tuple(job.plan.job for job in jobs), states)

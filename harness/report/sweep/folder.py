"""A sweep's folder, and what can be read from it again: plans, records, and what the jobs were called."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compare.correctness.check import Check, not_checked
from harness.compare.correctness.checks_runs import (
    RESUMES,
    are_all_synchronised,
    chains_of,
    compare_observed,
    compare_ranks,
    compare_verifications,
    judge_resumed,
)
from harness.compare.correctness.evidence import Evidence
from harness.compare.correctness.verdict import Verdict, judge
from harness.compare.detection import CORRECT, trials_of
from harness.compare.plans import may_share_reference
from harness.errors import NotComparable
from harness.report.sweep.build import sweep_report
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.report.sweep.table import Labelled
from harness.run.folder import RESUMING, TRIALS, RunDir, read_json, write_json
from harness.run.plan import RunPlan, TrainPlan
from harness.run.record import FORMAT, RankResult, RunResult, check_format, run_result_from_json
from harness.run.visible import visible

_INSIDE = {TRIALS, RESUMING}
"""Folders of runs that belong to a job."""


class SweepDir:
    """The files of one sweep, beside the folders of its jobs."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def index(self) -> Path:
        """What the jobs are called, what they ran on, and by whom they were reported (JSON)."""
        return self.path / "sweep.json"

    def write(
        self, jobs: Iterable[tuple[Labelled, Path]], machine: Mapping[str, str], report: Mapping[str, Any] | None = None
    ) -> None:
        """Add jobs to the index; a sweeper may bring them in several batches.

        Args:
            report: The resolved ``report`` group, so that the same reporters can be made again.
        """
        new = list(jobs)
        # Job 0 begins a sweep: an older one in the same folder has been written over.
        begins = any(job.plan.job == 0 for job, _ in new)
        entries = {} if begins else {entry["job"]: entry for entry in self.read()["jobs"]}
        for job, folder in new:
            entries[job.plan.job] = {
                "job": job.plan.job,
                # Relative, so that a sweep can be moved or copied, and be read on another machine.
                "folder": os.path.relpath(folder, self.path),
                "label": dict(job.label),
                "overrides": list(job.overrides),
            }
        self.path.mkdir(parents=True, exist_ok=True)
        # Recorded now: after a restart of the machine nobody could tell what the records' clock was.
        offset = time.time() - time.monotonic()
        head: dict[str, Any] = {"format": FORMAT, "machine": dict(machine), "clock_offset_s": offset}
        # What JSON cannot hold, such as a path, stands as text.
        head["report"] = json.loads(json.dumps(report, default=str))
        write_json(self.index, {**head, "jobs": list(entries.values())})

    def read(self) -> dict[str, Any]:
        """Return the index; an empty one where there is none."""
        if not self.index.exists():
            return {"machine": {}, "clock_offset_s": None, "jobs": []}
        return dict(_read_record(self.index))


def _read_record(path: Path) -> Any:
    """Return the JSON of a file.

    Raises:
        NotComparable: A newer harness has written it.
    """
    data = read_json(path)
    check_format(data, path)
    return data


_DAMAGED = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""What reading comes to in a file that was cut short, changed by hand, or written to be no record."""

MOST_RANKS = 100_000
"""A plan of more ranks is no plan that has run: reading would look for the records of each."""


def _reason(error: Exception) -> str:
    """Return in a few words what is wrong with a file, never what it holds."""
    return f"{type(error).__name__}: {str(error)[:200]}"


def find_sweeps(path: str | os.PathLike[str]) -> list[Path]:
    """Return the sweeps in a folder: itself, those inside it, or the one that the folder of a job belongs to."""
    folder = Path(path).absolute()
    # The sweep and not the job alone: a speed or an identical twin is told against the other jobs.
    if RunDir(folder).plan.exists() and SweepDir(folder.parent).index.exists():
        return [folder.parent]
    # Without any index it may be a single run.
    return sorted(index.parent for index in folder.rglob(SweepDir(folder).index.name)) or [folder]


def read_sweep(path: str | os.PathLike[str]) -> SweepReport:
    """Return the report of a sweep's folder, or of the folder of one job.

    Raises:
        NotComparable: There is no run in it.
    """
    folder = Path(path).absolute()
    # By plans and not by the index, which a sweep that was cut off may not have; launches inside a job are not jobs.
    runs = sorted(plan.parent for plan in folder.rglob("plan.json") if not _INSIDE.intersection(plan.relative_to(folder).parts))
    if not runs:
        raise NotComparable(f"{path} holds no run: there is no plan.json in it. Give the folder of a sweep, outputs/DAY/TIME.")
    # A job's folder has its index beside it.
    index = SweepDir(folder if SweepDir(folder).index.exists() else folder.parent)
    try:
        known = index.read()
        # Resolved on both sides, as either may have been reached by a link.
        entries = {(index.path / entry["folder"]).resolve(): entry for entry in known["jobs"]}
    except _DAMAGED as error:
        raise NotComparable(f"{index.index} cannot be read: it is damaged ({_reason(error)}).") from error
    jobs = [_read_job(run, entries.get(run.resolve(), {})) for run in runs]
    return _report(folder, jobs, known)


def whole_sweep(folder: SweepDir, jobs: Sequence[JobReport]) -> SweepReport:
    """Return the report of the jobs that have just run, and of the sweep's earlier ones, which a sweeper ran in batches."""
    known, new = folder.read(), {job.plan.job for job in jobs}
    earlier = [e for e in known["jobs"] if e["job"] not in new and RunDir(folder.path / e["folder"]).plan.exists()]
    # What has just run is not read again: its reports are of the objects that were judged.
    read = [_read_job(folder.path / entry["folder"], entry) for entry in earlier]
    return _report(folder.path, [*read, *jobs], known)


def _report(folder: Path, jobs: Iterable[JobReport], index: Mapping[str, Any]) -> SweepReport:
    return _with_faults(sweep_report(str(folder), _by_verifications(jobs), index["machine"], index["clock_offset_s"]))


def _by_verifications(jobs: Iterable[JobReport]) -> Iterator[JobReport]:
    """Yield the jobs; R10 joins the verdict where an earlier job verified the same training, to the same depth."""
    before: list[JobReport] = []
    for job in sorted(jobs, key=lambda job: job.plan.job):
        known = next((earlier for earlier in before if may_share_reference(earlier.plan, job.plan)), None)
        if job.correctness is None or job.result.status != "ok":
            yield job
            continue
        # Only jobs that ended well and were verified: others hold nothing to be compared with.
        before.append(job)
        yield job if known is None else _against_verification(job, job.correctness, known)


def _against_verification(job: JobReport, verdict: Verdict, known: JobReport) -> JobReport:
    evidence, known_evidence = (_read_record(RunDir(each.folder).evidence) for each in (job, known))
    check = compare_verifications(known.plan, known_evidence, job.plan, evidence)
    return dataclasses.replace(job, correctness=verdict.joined_by(check))


def _with_faults(sweep: SweepReport) -> SweepReport:
    """Return the report with what the checks say of each injected fault, in jobs that have one and in audits."""
    statuses: dict[str, Mapping[str, str]] = {}
    for job in sweep.jobs:
        if job.plan.train is not None and job.plan.train.fault is not None and job.correctness is not None:
            # The first run of a fault counts, as the matrix has one row for each.
            statuses.setdefault(job.plan.train.fault, {check.name: check.status for check in job.correctness.checks})
        for trial in trials_of(read_audit(RunDir(job.folder)) or {"trials": []}):
            if trial.fault != CORRECT:
                statuses.setdefault(trial.fault, trial.checks)
    return dataclasses.replace(sweep, faults=statuses)


def read_audit(run: RunDir) -> dict[str, Any] | None:
    """Return what an audit has left in a run's folder; None without one."""
    return visible(dict(_read_record(run.audit))) if run.audit.exists() else None


def _read_job(folder: Path, entry: Mapping[str, Any]) -> JobReport:
    run = RunDir(folder)
    try:
        plan = RunPlan.read(run)
        if not isinstance(plan.nprocs, int) or not 1 <= plan.nprocs <= MOST_RANKS:
            raise ValueError(f"{plan.nprocs} is no number of ranks")
        result = read_result(run, plan)
        return job_report(plan, run, result, entry.get("label", {}), entry.get("overrides", ()))
    except _DAMAGED as error:
        cause = f"its files are damaged, or another version of harness has written them ({_reason(error)})"
        raise NotComparable(f"{run.path} cannot be read: {cause}.") from error


def job_report(plan: RunPlan, run: RunDir, result: RunResult, label: Mapping[str, str], overrides: Sequence[str]) -> JobReport:
    """Return the report of one job, with the verdict on the evidence in its folder."""
    verdict, trials = read_verdict(run), tuple(read_trials(run))
    if verdict is not None and result.status == "ok" and plan.train is not None:
        verdict = verdict.joined_by(*_of_training(plan, plan.train, run, result))
    # A parent that lives writes a result of every failure: without one the run was ended from outside.
    ended = result.status != "ok" and not run.result.exists()
    return JobReport(plan, str(run.path), result, label, tuple(overrides), correctness=verdict, trials=trials, ended=ended)


def _of_training(plan: RunPlan, train: TrainPlan, run: RunDir, result: RunResult) -> Iterator[Check]:
    """Yield the checks of a whole training that has ended well."""
    evidence: Evidence = _read_record(run.evidence)
    yield compare_ranks(chains_of(result), are_all_synchronised(evidence))
    if train.resume:
        yield not_checked("R13", "the verified steps are the first ones, and this training went on from a checkpoint")
    else:
        yield compare_observed(evidence, chains_of(result))
    if train.compare in RESUMES:
        yield judge_resumed(plan, result, run, _read_inside(run.interrupted), _read_inside(run.resumed))


def _read_inside(run: RunDir) -> RunResult | None:
    """Return what came out of a run; None where it came to no end, because nobody started it or its parent was ended."""
    return read_result(run, RunPlan.read(run)) if run.result.exists() else None


def read_trials(run: RunDir) -> Iterator[tuple[RunPlan, RunResult]]:
    """Yield plan and result of each launch that was made to compare launchers, in their order."""
    runs = [RunDir(folder) for folder in (run.path / TRIALS).glob("*") if RunDir(folder).plan.exists()]
    # As numbers: as text 10 would come before 2.
    for trial in sorted(runs, key=lambda trial: int(trial.path.name)):
        plan = RunPlan.read(trial)
        yield plan, read_result(trial, plan)


def read_verdict(run: RunDir) -> Verdict | None:
    """Return what the checks says of a run; None where nothing was verified."""
    if not run.evidence.exists():
        return None
    return judge(_read_record(run.evidence))


def read_result(run: RunDir, plan: RunPlan) -> RunResult:
    """Return what came out of a run; where its parent did not live to write that, what the ranks recorded."""
    # The parent's word comes first, because it knows why ranks ended that could write nothing.
    if run.result.exists():
        return _sound(run_result_from_json(_read_record(run.result)))
    # Ranks write as they go, so that a run whose parent was killed still has all that they did.
    ranks = tuple(RankResult.from_events(rank, run.events(rank)) for rank in range(plan.nprocs))
    return RunResult("failed", ranks, message=f"the run was ended before it was judged: there is no {run.result.name}.")


def _sound(result: RunResult) -> RunResult:
    """Return the result, if what times are made of are numbers that a clock and a kernel can have given.

    Raises:
        ValueError: One is not.
    """
    for rank in result.ranks:
        spans = [step.seconds for step in rank.steps]
        counted = [value for meter in rank.meters for name, value in meter.items() if name != "name" and value is not None]
        clocks = [*(step.t for step in rank.steps), *rank.marks.values(), *counted]
        # Said once, where files are read: all arithmetic on times may rely on it.
        if not all(_is_finite(value) for value in (*spans, *clocks)) or not all(value > 0 for value in spans):
            raise ValueError(f"a time of rank {rank.rank} is none")
        if not all(isinstance(step.loss_sum, int | float) and isinstance(step.count, int | float) for step in rank.steps):
            raise ValueError(f"a loss of rank {rank.rank} is no number")
    if not all(_is_finite(value) for value in result.marks.values()):
        raise ValueError("a mark of the run is no time")
    return result


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

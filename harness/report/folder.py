"""A sweep's folder, and what can be read from it again: plans, records, and what the jobs were called."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import NotComparable
from harness.plan import RunPlan
from harness.record import FORMAT, RankResult, RunResult, run_result_from_json
from harness.report.build import sweep_report
from harness.report.sweep_report import JobReport, SweepReport
from harness.report.table import Labelled
from harness.rundir import RunDir, write_json


class SweepDir:
    """The files of one sweep, beside the folders of its jobs."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def index(self) -> Path:
        """What the jobs are called, and what they ran on (JSON)."""
        return self.path / "sweep.json"

    def write(self, jobs: Iterable[tuple[Labelled, Path]], machine: Mapping[str, str]) -> None:
        """Add jobs to the index; a sweeper may bring them in several batches."""
        entries = {entry["job"]: entry for entry in self.read()["jobs"]}
        for job, folder in jobs:
            entries[job.plan.job] = {
                "job": job.plan.job,
                "folder": os.path.relpath(folder, self.path),
                "label": dict(job.label),
                "overrides": list(job.overrides),
            }
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.index, {"format": FORMAT, "machine": dict(machine), "jobs": list(entries.values())})

    def read(self) -> dict[str, Any]:
        """Return the index; an empty one where there is none."""
        if not self.index.exists():
            return {"machine": {}, "jobs": []}
        data: dict[str, Any] = json.loads(self.index.read_text())
        return data


def read_sweep(path: str | os.PathLike[str]) -> SweepReport:
    """Return the report of a sweep's folder, or of the folder of one job.

    Raises:
        NotComparable: There is no run in it.
    """
    folder = Path(path).absolute()
    runs = sorted(plan.parent for plan in folder.rglob("plan.json"))
    if not runs:
        raise NotComparable(f"{path} holds no run: there is no plan.json in it. Give the folder of a sweep, outputs/DAY/TIME.")
    index = SweepDir(folder if SweepDir(folder).index.exists() else folder.parent)
    entries = {(index.path / entry["folder"]).resolve(): entry for entry in index.read()["jobs"]}
    jobs = [_read_job(run, entries.get(run.resolve(), {})) for run in runs]
    return sweep_report(str(folder), jobs, index.read()["machine"])


def _read_job(folder: Path, entry: Mapping[str, Any]) -> JobReport:
    run = RunDir(folder)
    plan = RunPlan.read(run)
    return JobReport(plan, str(folder), read_result(run, plan), entry.get("label", {}), tuple(entry.get("overrides", ())))


def read_result(run: RunDir, plan: RunPlan) -> RunResult:
    """Return what came out of a run; where its parent did not live to write that, what the ranks recorded."""
    if run.result.exists():
        return run_result_from_json(json.loads(run.result.read_text()))
    ranks = tuple(RankResult.from_events(rank, run.events(rank)) for rank in range(plan.nprocs))
    return RunResult("failed", ranks, message=f"the run was ended before it was judged: there is no {run.result.name}.")


def common_folder(folders: Sequence[Path]) -> Path:
    """Return the innermost folder that holds all of them."""
    return Path(os.path.commonpath(folders))

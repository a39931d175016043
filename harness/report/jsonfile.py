"""``report.json``: what the table says, for machines: plain numbers in the units that their names end in, null for unknown.

A number that is known and not finite, such as a loss, stands as :mod:`harness.run.json_text` says.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from harness.compare.performance.verdict import PerformanceVerdict
from harness.report.figures.waiting import waiting
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.run.folder import write_json
from harness.run.record import FORMAT


class Json:
    """Writes ``report.json`` into the sweep's folder."""

    def report(self, sweep: SweepReport) -> None:
        """Write it."""
        write_json(Path(sweep.folder) / "report.json", sweep_json(sweep))


def sweep_json(sweep: SweepReport) -> dict[str, Any]:
    """Return the report of a sweep as plain data."""
    well = all(tables.is_well(job) for job in sweep.jobs)
    # With the format's number, as other people's programs read it.
    head = {"format": FORMAT, "folder": sweep.folder, "ok": well, "machine": dict(sweep.machine)}
    jobs = [{**_job(job), "remarks": list(sweep.remarks.get(job.plan.job, ()))} for job in sweep.jobs]
    return {**head, "jobs": jobs}


def _job(job: JobReport) -> dict[str, Any]:
    measured = times.step_times(job)
    losses = job.result.losses()
    # Rank 0's do, as every rank holds the sums over all of them.
    evaluations = job.result.ranks[0].evaluations if job.result.ranks else ()
    return {
        "job": job.plan.job,
        "folder": job.folder,
        "label": dict(tables.settings(job)),
        "overrides": list(job.overrides),
        "status": job.result.status,
        "message": job.result.account,
        "failed_rank": job.result.failed_rank,
        "nprocs": job.plan.nprocs,
        "first_step_s": _known(times.typical_first_step_s(job)),
        "num_measured_steps": len(measured),
        "step_s": _known(times.step_s(job)),
        "step_spread_s": _known(times.typical_step_s(job)[1]),
        "num_launches": len(times.launches(job)),
        "launches_are_clean": not times.mark(job),
        "failed_launches": [plan.trial.order for plan, result in job.trials if plan.trial and result.status != "ok"],
        "strayed_launches": list(job.strayed),
        "samples_per_s": _known(times.samples_per_s(job)),
        "wall_s": _known(times.wall_s(job)),
        **waiting(job),
        "loss": losses[-1] if losses else None,
        "evaluation": evaluations[-1].means() if evaluations else None,
        "baseline": job.baseline,
        "speed": _speed(job.speed) if job.speed else None,
        "rival": job.rival,
        "pace": _speed(job.pace) if job.pace else None,
        "start": _speed(job.start) if job.start else None,
        "resolutions": [dataclasses.asdict(resolution) for resolution in job.resolutions],
        "unresolved": job.unresolved,
        "identical_to": job.identical_to,
        "verdict": tables.state(job),
        "checks": [dataclasses.asdict(check) for check in job.correctness.checks] if job.correctness else [],
    }


def _speed(speed: PerformanceVerdict) -> dict[str, Any]:
    # Of times, not of speeds: below 1 is faster.
    interval = [speed.interval.low, speed.interval.high] if speed.interval else None
    known = {"verdict": speed.verdict, "time_ratio": speed.ratio, "interval": interval, "pairs": speed.pairs}
    return {**known, "margin": speed.margin, "sentences": list(speed.sentences)}


def _known(value: float) -> float | None:
    # NaN is no JSON, and means here that nothing was measured.
    return None if math.isnan(value) else value

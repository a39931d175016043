"""The launches of a job as the numbers that comparisons are made of."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.compare.performance.launches import OTHERS_LIMIT, SHORTEST_WINDOW_S, Launch
from harness.compare.performance.phases import PROOF, phases
from harness.report.figures.timeline import marks_of
from harness.report.sweep.sweep_report import JobReport
from harness.report.sweep.times import first_step_s, step_times
from harness.run.record import RankResult

NOT_THE_WORK = frozenset(
    {
        *("num_workers", "log_every", "eval_every", "checkpoint_every", "deterministic", "compile", "ddp"),
        *("compare", "on_mismatch", "reference", "profile"),
    }
)
"""Settings of the training that do not change what is to be computed, so that jobs which differ in them are compared."""


def work(job: JobReport) -> dict[str, Any]:
    """Return the settings that decide what is computed, by name."""
    assert job.plan.train is not None
    return {k: v for k, v in dataclasses.asdict(job.plan.train).items() if k not in NOT_THE_WORK}


def trials_of(job: JobReport, machine: Mapping[str, str]) -> list[Launch]:
    """Return every trial of a job as numbers to compare; one that failed is missing, and so counts as disturbed."""
    done = [(plan, result) for plan, result in job.trials if result.status == "ok"]
    return [launch_of(dataclasses.replace(job, plan=plan, result=result), machine) for plan, result in done]


def launched_in_turn(jobs: Sequence[JobReport]) -> bool:
    """Return whether all of these jobs were launched for a comparison, and for the same one, so that launches make pairs."""
    comparisons = {plan.trial.among for job in jobs for plan, _ in job.trials if plan.trial}
    return len(comparisons) == 1 and all(job.trials for job in jobs)


def launch_of(job: JobReport, machine: Mapping[str, str]) -> Launch:
    """Return one run as the numbers that performance is compared by; of ranks, the one that was disturbed most."""
    assert job.plan.train is not None
    windows = [window for rank in job.result.ranks if (window := _window(rank))]
    # Ranks measure the same steps: the longest window stands for all.
    wall_s = max((window["t"] for window in windows), default=0.0)
    pressure = _largest(windows, "pressure_s")
    return Launch(
        arm=f"job {job.plan.job}",
        order=job.plan.trial.order if job.plan.trial else job.plan.job,
        # Own runs are all of pair 0, so that each makes one pair with any other's.
        pair=job.plan.trial.pair if job.plan.trial else 0,
        # A job that verifies would else seem to start later than one that does not.
        start_s=first_step_s(job) - _proof_s(job),
        step_s=tuple(step_times(job)),
        samples_per_step=job.plan.train.global_batch_size,
        nprocs=job.plan.nprocs,
        threads=job.plan.threads,
        workers=job.plan.train.num_workers,
        machine=digest(machine),
        cores=int(machine["cores"]) if machine.get("cores", "").isdigit() else None,
        wall_s=wall_s,
        run_delay_s=_largest(windows, "run_delay_s"),
        step_delay_s=tuple(_step_delays(job)),
        cpu_pressure=None if pressure is None or not wall_s else pressure / wall_s,
        others_s=_others_s(windows),
        throttled=int(_largest(windows, "throttled") or 0),
        major_faults=int(_largest(windows, "major_faults") or 0),
        involuntary_switches=int(_largest(windows, "involuntary_switches") or 0),
    )


def _proof_s(job: JobReport) -> float:
    """Return the seconds of start-up that the proof took, of the slowest rank."""
    parts = [[p.seconds for p in phases(marks_of(job, rank)) if p.phase in PROOF] for rank in job.result.ranks]
    return max((sum(seconds) for seconds in parts), default=0.0)


def _window(rank: RankResult) -> dict[str, float]:
    """Return what the kernel counted from the end of the warm-up to the last step; empty where it was not recorded."""
    readings = {meter["name"]: meter for meter in rank.meters}
    # Only the difference of two readings is of the measured steps: counters run from the start of the process.
    if not {"warm", "last step"} <= readings.keys():
        return {}
    first, last = readings["warm"], readings["last step"]
    # What the kernel does not count is left out, and not taken for 0.
    return {k: last[k] - v for k, v in first.items() if k != "name" and v is not None and last[k] is not None}


def _others_s(windows: Sequence[Mapping[str, float]]) -> float | None:
    """Return the CPU time in the window that no rank used; None where it is not known well enough.

    Ranks that are bound to different cores each see their own alone: together they then used more than any of them saw.
    """
    busy, wall_s = _largest(windows, "busy_s"), _largest(windows, "t") or 0.0
    if busy is None or wall_s < SHORTEST_WINDOW_S or not all("cpu_s" in window for window in windows):
        return None
    # Idle time comes in units of 10 ms: a little below 0 is no sign that it was miscounted.
    others = busy - sum(window["cpu_s"] for window in windows)
    return max(0.0, others) if others >= -OTHERS_LIMIT * wall_s else None


def _largest(windows: Sequence[Mapping[str, float]], name: str) -> float | None:
    return max((window[name] for window in windows if name in window), default=None)


def _step_delays(job: JobReport) -> list[float]:
    """Return the run-delay of each measured step, of its slowest rank; empty where any was not recorded."""
    warmup = job.plan.train.warmup_steps if job.plan.train else 0
    steps = list(zip(*(rank.steps for rank in job.result.ranks), strict=False))[warmup:]
    # Of the rank whose time is the step's: another one's delay has not made it longer.
    delays = [max(parts, key=lambda step: step.seconds).delay_s for parts in steps]
    return [delay for delay in delays if delay is not None] if None not in delays else []


def digest(machine: Mapping[str, str]) -> str:
    """Return a short name of a machine's facts; equal facts, equal name."""
    return hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:16]

"""SweepReport: all that is known of a sweep, as every reporter gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.compare.correctness.verdict import Verdict
from harness.compare.performance.resolution import Resolution
from harness.compare.performance.verdict import PerformanceVerdict
from harness.run.plan import RunPlan
from harness.run.record import RunResult
from harness.run.visible import visible


@dataclass(frozen=True)
class JobReport:
    """One job.

    Attributes:
        folder: The job's folder, absolute.
        label: Column -> chosen option: ``recipe``, ``launcher``, ``nprocs``, and whatever else the sweep varies.
        overrides: What the user typed for it.
        correctness: None where nothing was compared.
        identical_to: Number of the job whose digests are these, bit for bit; None without one.
        baseline: Number of the job that its speed is compared with; its own number for a baseline.
        speed: None for a baseline, and where nothing was compared.
        rival: Number of the first job with as many ranks that it was launched in pairs with; None without one.
        pace: Its speed against the rival's.
        start: The same for the time from the call to the first step.
        trials: Plan and result of each further launch, made to compare launchers.
        strayed: Their numbers that trained other bits than the job's own run, so that no speed rests on any of them.
        clean: Their numbers that nothing disturbed: the job's steps rest on these, where there are any.
        undisturbed: Their numbers that nothing is known to have disturbed: its start rests on these, as nobody watches a start.
        resolutions: What the job, held against itself, shows of the machine; empty unless that was asked for.
        unresolved: Why it shows nothing, where that was asked for.
        ended: Whether the command was ended while it ran, by the user or by the system.
    """

    plan: RunPlan
    folder: str
    result: RunResult
    label: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    correctness: Verdict | None = None
    identical_to: int | None = None
    baseline: int | None = None
    speed: PerformanceVerdict | None = None
    rival: int | None = None
    pace: PerformanceVerdict | None = None
    start: PerformanceVerdict | None = None
    trials: tuple[tuple[RunPlan, RunResult], ...] = ()
    strayed: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()
    undisturbed: tuple[int, ...] = ()
    resolutions: tuple[Resolution, ...] = ()
    unresolved: str = ""
    ended: bool = False


@dataclass(frozen=True)
class SweepReport:
    """One sweep.

    Attributes:
        folder: The sweep's folder, absolute.
        machine: What it ran on: cores, CPU, memory, versions.
        clock_offset_s: What added to CLOCK_MONOTONIC gives the time of day; None where it was not recorded.
        remarks: Number of a job -> sentences on how it scales, and on a rank that holds up the others.
        faults: Of runs with an injected fault: name of the fault -> check -> ``passed``, ``failed`` or ``not checked``.
    """

    folder: str
    jobs: tuple[JobReport, ...]
    machine: Mapping[str, str] = field(default_factory=dict)
    clock_offset_s: float | None = None
    faults: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    remarks: Mapping[int, Sequence[str]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The folder as it can be shown."""
        return visible(self.folder)

    @property
    def name(self) -> str:
        """The last two parts of the folder, ``DAY TIME``, as they can be shown."""
        path = Path(self.place)
        return f"{path.parent.name} {path.name}".strip()

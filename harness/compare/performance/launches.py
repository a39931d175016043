"""Launches as plain numbers: what one of them came to, what disturbed it, and which may be compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.compare.performance import stats
from harness.errors import NotComparable

Quantity = Literal["throughput", "start"]

# Shares of the window. Pressure may be higher, as it counts the waiting of any task of the machine.
RUN_DELAY_LIMIT = 0.05
CPU_PRESSURE_LIMIT = 0.10
OTHERS_LIMIT = 0.10
"""Cores that other processes may use: on 2 quiet ones the kernel's own work took 0.03 to 0.08 beside 1, 2 and 4 ranks."""
SHORTEST_WINDOW_S = 0.25
"""In a shorter window what others used is not known: a core's idle time comes in units of 10 ms."""
SWITCHES_PER_STEP_LIMIT = 1.0
"""Involuntary context switches per step: stands in for run-delay where the kernel does not count it. Not calibrated."""


@dataclass(frozen=True)
class Launch:
    """One launch of one arm, as plain numbers.

    Attributes:
        arm: Label of what is compared, such as ``job 0``.
        order: Position among all launches of the comparison, from 0.
        pair: Number of its pair; None for the pilot, which is not counted.
        start_s: From the call to the end of the first step on all ranks.
        step_s: For each measured step (warm-up left out) the slowest rank's time.
        samples_per_step: Over all ranks: the global batch size.
        threads: Per rank.
        workers: Processes that load data, per rank.
        machine: Digest of cores, CPU, memory and versions.
        cores: That the launch may use; None where unknown.
        wall_s: Length of the measured window; 0 where none was recorded.
        run_delay_s: In that window, of the rank that waited most; None where the kernel does not count it.
        step_delay_s: The same for each measured step, of the step's slowest rank; empty where not recorded.
        cpu_pressure: Share of the window in which a runnable task waited (``/proc/pressure/cpu``); None where unknown.
        others_s: CPU time in the window that neither ranks nor their data workers used; None where unknown.
        throttled: How often the control group held a rank back in the window.
        major_faults: Page faults in the window that had to read a disk.
        involuntary_switches: In the window, per rank; used where ``run_delay_s`` is None.
    """

    arm: str
    order: int
    pair: int | None
    start_s: float
    step_s: tuple[float, ...]
    samples_per_step: int
    nprocs: int
    threads: int
    machine: str
    cores: int | None = None
    wall_s: float = 0.0
    run_delay_s: float | None = None
    step_delay_s: tuple[float, ...] = ()
    cpu_pressure: float | None = None
    others_s: float | None = None
    throttled: int = 0
    major_faults: int = 0
    involuntary_switches: int = 0
    workers: int = 0

    @property
    def oversubscribed(self) -> bool:
        """True where there are more ranks than cores."""
        return self.cores is not None and self.nprocs > self.cores

    @property
    def crowded(self) -> bool:
        """True where the launch's own threads and data workers outnumber the cores, so that they wait for each other."""
        return self.cores is not None and self.nprocs * (max(1, self.threads) + self.workers) > self.cores

    @property
    def is_short(self) -> bool:
        """True where the measured window is too short to tell what others used in it."""
        return self.others is None and 0 < self.wall_s < SHORTEST_WINDOW_S

    @property
    def delay_share(self) -> float | None:
        """Run-delay as a share of the measured window; None where it is unknown."""
        if self.run_delay_s is None or self.wall_s <= 0:
            return None
        return self.run_delay_s / self.wall_s

    @property
    def others(self) -> float | None:
        """Cores that other processes used on average; None where unknown."""
        return self.others_s / self.wall_s if self.others_s is not None and self.wall_s > 0 else None

    @property
    def quiet(self) -> bool:
        """True where other processes are known to have used next to nothing: who waited, waited for the launch's own."""
        # Known to be quiet: where nobody counted, silence is not taken for it.
        return self.others is not None and self.others <= OTHERS_LIMIT


# From a launch to one number


def raw_step_s(launch: Launch) -> float:
    """Return the median over the measured steps of the slowest rank's time, in seconds.

    Raises:
        NotComparable: No step was measured.
    """
    if not launch.step_s:
        raise NotComparable(f"{launch.arm} has no measured step: set steps above the number of warm-up steps.")
    return stats.median(launch.step_s)


def launch_step_s(launch: Launch) -> float:
    """Return the same with the run-delay subtracted; as measured, where no run-delay of other processes is known.

    Step by step where each step's delay is recorded; else by the window's share of it, which takes slightly too much
    off a median where the delay fell into few steps. A launch is left as it is where its own threads outnumber the cores or
    no other process was at work: its ranks (and gloo's threads beside them) wait for each other, which is part of its time.
    """
    if not adjustable(launch):
        return raw_step_s(launch)
    if len(launch.step_delay_s) == len(launch.step_s) > 0:
        # Step by step, as the median of differences is not the difference of medians.
        delays = zip(launch.step_s, launch.step_delay_s, strict=True)
        return stats.median([max(step - delay, 0.0) for step, delay in delays])
    return raw_step_s(launch) * (1 - min(launch.delay_share or 0.0, 1.0))


def adjustable(launch: Launch) -> bool:
    """Return whether run-delay was recorded and can be laid to other processes."""
    return launch.delay_share is not None and not launch.crowded and not launch.quiet


def seconds(launch: Launch, quantity: Quantity, adjusted: bool) -> float:
    """Return what is compared, in seconds: per sample (throughput) or from call to first step (start).

    Start-up is never adjusted: how much ranks wait for each other while they start is the launcher's own doing.
    """
    if quantity == "start":
        return launch.start_s
    return (launch_step_s if adjusted else raw_step_s)(launch) / launch.samples_per_step


def typical(launches: Sequence[Launch], quantity: Quantity) -> tuple[float, float]:
    """Return the number for a table and the one after its +-, as measured, in seconds per step or of start-up.

    Of several launches, their median and spread; of one, the median and spread of its steps (start-up: spread NaN).
    """
    if quantity == "start":
        values: Sequence[float] = [launch.start_s for launch in launches]
    else:
        values = launches[0].step_s if len(launches) == 1 else [raw_step_s(launch) for launch in launches]
    return stats.median(values), stats.spread(values) if len(values) > 1 else math.nan


def contamination(launch: Launch) -> list[str]:
    """Return what disturbed the launch, a reason a line; empty where nothing is known to have.

    Run-delay and CPU pressure count only where other processes are known to have used more than :data:`OTHERS_LIMIT`: ranks
    wait for each other too.
    """
    known = launch.others is not None and not launch.quiet
    reasons = [f"{wait} beside others on {launch.others:.2f} cores" for wait in waiting(launch)] if known else []
    # These two need no witness: a quota or a disk holds up a launch whoever else is on the machine.
    if launch.throttled > 0:
        reasons.append(f"throttled {launch.throttled} times")
    if launch.major_faults > 0:
        reasons.append(f"{launch.major_faults} major page faults")
    return reasons


def waiting(launch: Launch) -> list[str]:
    """Return how long ready tasks waited for a core, where that is more than usual, whoever made them wait."""
    reasons = []
    share, switches = launch.delay_share, launch.involuntary_switches / max(1, len(launch.step_s))
    if share is not None and share > RUN_DELAY_LIMIT:
        reasons.append(f"run-delay {100 * share:.1f} %")
    # Where run-delay is known it says how long ranks waited, and not only how often.
    if share is None and switches > SWITCHES_PER_STEP_LIMIT:
        reasons.append(f"{switches:.1f} involuntary context switches per step")
    if launch.cpu_pressure is not None and launch.cpu_pressure > CPU_PRESSURE_LIMIT:
        reasons.append(f"CPU pressure {100 * launch.cpu_pressure:.1f} %")
    return reasons


def untold(launch: Launch) -> str:
    """Return why nobody can tell whether others disturbed the measured steps; empty where that is known.

    In a short window nobody can, however much was waited: to leave out those launches alone in which much was would favour
    whoever waits for its own ranks now and then. In a longer one that does not tell what others used, waiting is no sign of
    others where the launch's own threads outnumber the cores.
    """
    # Asked before anything that was seen in the window: all such launches are left out alike.
    if launch.is_short:
        return f"too short to tell ({launch.wall_s:.2f} s of measured steps; use more)"
    waited = waiting(launch) if launch.others is None and not launch.crowded else []
    return f"{waited[0]}, and who made it wait is not known" if waited else ""


# What may be compared

CONDITIONS: Mapping[str, Callable[[Launch], object]] = {
    "nprocs": lambda launch: launch.nprocs,
    "threads": lambda launch: launch.threads,
    "machine": lambda launch: launch.machine,
    "global_batch_size": lambda launch: launch.samples_per_step,
    # A median over more steps is steadier: arms of different lengths would differ in that alone.
    "steps": lambda launch: len(launch.step_s),
}
"""What must be equal in all launches of a comparison, under the name that the user knows."""


def require_comparable(launches: Sequence[Launch], varied: Iterable[str] = ()) -> None:
    """Pass where all launches ran under the same conditions.

    Args:
        launches: The first is the one the others are held against.
        varied: Names of :data:`CONDITIONS` that are themselves what is compared, such as ``nprocs``.

    Raises:
        NotComparable: The message names arms, conditions and both values.
    """
    first = launches[0]
    for other in launches[1:]:
        values = [(name, of(other), of(first)) for name, of in CONDITIONS.items() if name not in set(varied)]
        # All at once, so that nobody mends one condition only to be told of the next.
        differing = "; ".join(f"{name} is {value} against {wanted}" for name, value, wanted in values if value != wanted)
        if differing:
            raise NotComparable(f"{_named(other, first)} cannot be compared with {_named(first, other)}: {differing}.")


def _named(launch: Launch, other: Launch) -> str:
    return launch.arm if launch.arm != other.arm else f"{launch.arm} (launch {launch.order})"


def counted(launches: Sequence[Launch], role: str) -> dict[int, Launch]:
    """Return the launches by their pair, without the pilot.

    Raises:
        NotComparable: There is none.
    """
    by_pair = {launch.pair: launch for launch in launches if launch.pair is not None}
    if not by_pair:
        name = launches[0].arm if launches else role
        raise NotComparable(f"{name} has no launch that counts: all failed, or only the pilot was made.")
    return by_pair


def reasons(both: Sequence[Launch]) -> tuple[str, ...]:
    """Return what disturbed any launch of a pair, each with its arm."""
    return tuple(f"{launch.arm}: {reason}" for launch in both for reason in contamination(launch))


def doubts(both: Sequence[Launch], quantity: Quantity = "throughput") -> tuple[str, ...]:
    """Return why nobody can tell whether a pair's steps were disturbed, each with its arm; start-up needs no such window."""
    return tuple(f"{launch.arm}: {why}" for launch in both if (why := untold(launch))) if quantity == "throughput" else ()

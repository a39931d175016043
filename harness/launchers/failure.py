"""What a hang, an absence or a stranding is called. Pure, but for the files that exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from harness.errors import aside
from harness.launchers.rank_state import RankState
from harness.launchers.stacks import absent_ranks
from harness.run.folder import RunDir
from harness.run.outcome import listed
from harness.run.plan import RunPlan
from harness.run.record import RunResult


@dataclasses.dataclass(frozen=True)
class Stranding:
    """Ranks that wait for a group that another has left without joining it."""

    gone: int
    waiting: Sequence[int]


def find_stranding(states: Sequence[RankState]) -> Stranding | None:
    """Return who has left without joining the group that others wait for; None where nobody has."""
    # A rank that has raised has not left: that is a failure of its own, and is called one.
    gone = [state.rank for state in states if state.has_left and not state.has_joined]
    waiting = [state.rank for state in states if state.is_joining and not (state.has_joined or state.has_finished)]
    return Stranding(gone[0], waiting) if gone and waiting else None


def is_silent(states: Sequence[RankState], limit_s: float | None, now: float) -> bool:
    """Return True where every rank that is not done has been silent for longer than ``limit_s``."""
    silent = [state for state in states if not state.has_finished]
    # All of them, because ranks that wait for one that still works are silent too.
    return limit_s is not None and bool(silent) and all(now - state.heard > limit_s for state in silent)


def judge_stranding(result: RunResult, run: RunDir, stranding: Stranding) -> RunResult:
    """Return ``result`` with the rank named that left without joining the group."""
    gone = stranding.gone
    message = f"rank {gone} of {len(result.ranks)} ended without joining the group. {listed(stranding.waiting)} waited for it."
    return _failed(result, message, gone, f"Log: {log_of(run, gone)}")


def judge_absence(result: RunResult, run: RunDir, absent: Sequence[int]) -> RunResult:
    """Return ``result`` with the ranks named that did not arrive where the others waited until that failed."""
    message = f"{listed(absent)} of {len(result.ranks)} did not arrive where the others waited. {result.message}"
    see = f"{result.see} Stacks of all ranks: {_shown(run.stacks)}".strip()
    return dataclasses.replace(result, message=message, see=see, failed_rank=absent[0])


def judge_hang(result: RunResult, run: RunDir, plan: RunPlan, stacks: Sequence[str]) -> RunResult:
    """Return ``result`` with the rank named that is likeliest to be the one that hangs."""
    absent = absent_ranks(stacks, result.ranks)
    # Where the stacks tell nothing, whoever is fewest steps ahead keeps the others waiting.
    rank = absent[0] if absent else min(result.ranks, key=lambda r: len(r.steps)).rank
    total = plan.train.steps if plan.train else None
    limit = f"{plan.timeout_s:g} s{aside(plan.words, 'timeout_s')}"
    # Not even its start was recorded: it could not be asked for its stacks.
    if result.ranks[rank].pid is None:
        message = f"rank {rank} of {plan.nprocs} did not start within {limit}."
        return _failed(result, message, rank, f"Log: {log_of(run, rank)}")
    steps = result.ranks[rank].steps
    after = f" after step {steps[-1].step + 1}" + (f" of {total}" if total else "") if steps else ""
    # Where all are absent, nobody waits for them: each hangs by itself.
    others = f" {listed(absent)} did not arrive where the others waited." if 0 < len(absent) < len(result.ranks) else ""
    message = f"rank {rank} of {plan.nprocs} was silent for {limit}{after}; all ranks were stopped.{others}"
    return _failed(result, message, rank, f"Stacks of all ranks: {_shown(run.stacks)}")


def judge_agent(result: RunResult, run: RunDir) -> RunResult:
    """Return ``result`` as that of an agent that failed by itself."""
    message = "torch's agent failed although its ranks finished."
    return dataclasses.replace(result, status="failed", message=message, see=f"Log: {_shown(run.launcher_log)}", exit_code=1)


def log_of(run: RunDir, rank: int) -> str:
    """Return where to look for what a rank said; an interpreter that did not come up says it elsewhere."""
    log = run.log(rank)
    return _shown(log if log.exists() or not run.launcher_log.exists() else run.launcher_log)


def _failed(result: RunResult, message: str, rank: int, see: str) -> RunResult:
    # The supervisor has stopped the ranks: what their own codes and signals say is its doing.
    return dataclasses.replace(
        result, status="failed", message=message, see=see, failed_rank=rank, exit_code=1, signal=None, consequences=()
    )


def _shown(path: Path) -> str:
    """Return a path as short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)

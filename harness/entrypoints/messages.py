"""What a door says of a run in text: where its ranks run, and what a failed one left behind."""

from __future__ import annotations

from pathlib import Path

from harness.run.folder import RunDir
from harness.run.plan import RunPlan
from harness.run.record import RunResult


def summary(plan: RunPlan) -> str:
    """Return one line on where a run's ranks run, and why there."""
    where = f"{plan.device} {','.join(plan.devices)}" if plan.devices else plan.device
    ranks = "1 rank" if plan.nprocs == 1 else f"{plan.nprocs} ranks"
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    return f"{ranks} on {where}, backend {plan.backend} ({plan.backend_reason}), {threads} each, started by {plan.method}"


def details(result: RunResult, run: RunDir) -> str:
    """Return what the rank that fell first left behind: its traceback, the stacks of all, or its last lines of output."""
    if result.failed_rank is None:
        return ""
    failed = next((rank for rank in result.ranks if rank.rank == result.failed_rank), None)
    if failed is not None and failed.failure is not None:
        return failed.failure.traceback.rstrip()
    # No rank has raised anything: where each of them stood is all that there is to see.
    if "hung" in result.marks and run.stacks.exists():
        return run.stacks.read_text(errors="replace").rstrip()
    return last_lines(run.log(result.failed_rank))


def last_lines(path: Path, count: int = 20) -> str:
    """Return the end of a text file, empty where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        # Of a log of gigabytes only the end is read.
        file.seek(max(0, path.stat().st_size - 200 * count))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])

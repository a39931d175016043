"""The story in a page: each job of a sweep is planned, launched and collected; then the sweep is compared and reported."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.environ import common_environment
from harness.errors import HarnessError
from harness.launchers import pool
from harness.launchers.supervise import Observer, Supervisor
from harness.plan import RunPlan
from harness.record import RunResult, to_json
from harness.rundir import RunDir, write_json


@dataclass(frozen=True)
class Job:
    """One job of a sweep, ready to start.

    Attributes:
        overrides: What the user typed for it.
        label: Setting -> value for what the sweep varies, in the order of the columns.
    """

    plan: RunPlan
    run: RunDir
    overrides: Sequence[str] = ()
    label: Mapping[str, str] = field(default_factory=dict)


def run_job(plan: RunPlan, run: RunDir, observer: Observer | None = None) -> RunResult:
    """Start the ranks of one run, see them to their end, and leave ``result.json``; what keeps them from it fails the run."""
    called = time.monotonic()
    run.path.mkdir(parents=True, exist_ok=True)
    run.clear()
    plan.write(run)
    environment = common_environment(os.environ, plan, run.path)
    launcher = pool.launcher(plan.method)
    supervisor = Supervisor(run, plan, observer, called)
    try:
        result = supervisor.watch(lambda: launcher.start(run, plan, environment))
    except (HarnessError, OSError) as error:
        result = supervisor.failed(str(error))
    finally:
        run.tidy()
    assert result is not None
    try:
        write_json(run.result, to_json(result))
    except OSError as error:
        lost = f"The records of this run could not be written to {run.path}: {error.strerror}."
        return dataclasses.replace(result, status="failed", message=f"{result.message} {lost}".strip())
    return result


def inner_run(run: RunDir, folder: RunDir) -> RunDir:
    """Return ``folder``, made inside a job's, with the job's configuration."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if run.config.exists():
        folder.config.write_bytes(run.config.read_bytes())
    return folder


@contextmanager
def alone_in(folder: Path, setting: str = "hydra.sweep.dir") -> Iterator[None]:
    """Keep other commands from running in the same folder meanwhile; ``setting`` chooses another.

    Raises:
        HarnessError: One does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HarnessError(
                f"another command is running in {folder}: wait for it, or choose another folder with {setting}=FOLDER."
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

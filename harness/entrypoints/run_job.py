"""The story in a page: each job of a sweep is planned, launched and collected; then the sweep is compared and reported."""

from __future__ import annotations

import dataclasses
import os
import time

from harness.errors import HarnessError
from harness.launchers import registry
from harness.launchers.supervisor import Observer, Supervisor
from harness.run.environment import common_environment
from harness.run.folder import RunDir, write_json
from harness.run.plan import RunPlan
from harness.run.record import RunResult, to_json


def run_job(plan: RunPlan, run: RunDir, observer: Observer | None = None) -> RunResult:
    """Start the ranks of one run, see them to their end, and leave ``result.json``; what keeps them from it fails the run."""
    called = time.monotonic()
    run.path.mkdir(parents=True, exist_ok=True)
    run.clear()
    plan.write(run)
    environment = common_environment(os.environ, plan, run.path)
    launcher = registry.launcher(plan.method)
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

"""One run of ranks from its start to its result: what every door does with a plan."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence

from harness.errors import HarnessError
from harness.launchers import registry
from harness.launchers.base import Launcher, Process
from harness.launchers.display import Observer
from harness.launchers.supervisor import Supervisor
from harness.run.environment import common_environment
from harness.run.folder import RunDir, write_json
from harness.run.plan import RunPlan
from harness.run.record import RunResult, to_json


class Attempt:
    """The ranks of one run, for whoever does not wait for them at once."""

    def __init__(self, plan: RunPlan, run: RunDir, observer: Observer | None = None, launcher: Launcher | None = None) -> None:
        self.processes: Sequence[Process] = ()
        self._run = run
        self._plan = plan
        self._launcher = launcher or registry.launcher(plan.method)
        # The run's time counts from here: the files below are part of its start.
        self._supervisor = Supervisor(run, plan, observer, time.monotonic())
        run.path.mkdir(parents=True, exist_ok=True)
        # A folder may be used again, and what an earlier run left there would be read as this one's.
        run.clear()
        plan.write(run)

    def watch(self, timeout: float | None = None) -> RunResult | None:
        """Start the ranks if they do not run yet, and see them to their end; None if ``timeout`` seconds pass before."""
        return self._supervisor.watch(self._start, timeout)

    def stop(self) -> None:
        """End all ranks."""
        self._supervisor.stop()

    def failed(self, message: str) -> RunResult:
        """Return the result of ranks that could not be started."""
        return self._supervisor.failed(message)

    def _start(self) -> Sequence[Process]:
        environment = common_environment(os.environ, self._plan, self._run.path)
        self.processes = self._launcher.start(self._run, self._plan, environment)
        return self.processes


def run_job(plan: RunPlan, run: RunDir, observer: Observer | None = None, launcher: Launcher | None = None) -> RunResult:
    """Start the ranks of one run, see them to their end, and leave ``result.json``; what keeps them from it fails the run."""
    attempt = Attempt(plan, run, observer, launcher)
    try:
        result = attempt.watch()
    except BrokenPipeError:
        # Nothing of the run: whoever reads this command's output has seen enough.
        raise
    except (HarnessError, OSError) as error:
        result = attempt.failed(str(error))
    finally:
        run.tidy()
    assert result is not None
    try:
        write_json(run.result, to_json(result))
    except OSError as error:
        # What the ranks did is known, and told although the disk may be full.
        lost = f"The records of this run could not be written to {run.path}: {error.strerror}."
        return dataclasses.replace(result, status="failed", message=f"{result.message} {lost}".strip())
    return result


def inner_run(run: RunDir, folder: RunDir) -> RunDir:
    """Return ``folder``, made inside a job's, with the job's configuration."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if run.config.exists():
        folder.config.write_bytes(run.config.read_bytes())
    return folder

"""``launch``: one fresh Python interpreter per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from harness.launchers.base import Process, module_command, rank_environment, start_each
from harness.launchers.local import OwnProcess
from harness.run.folder import RunDir
from harness.run.plan import RunPlan


class LaunchLauncher:
    """Starts ``python -m harness.rank`` once per rank."""

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Start the ranks; a rank redirects its own output once it runs."""
        command = module_command("harness.rank", str(run.path))

        def start_rank(rank: int) -> Process:
            return OwnProcess(command, rank_environment(environment, rank, plan.nprocs), plan.cwd, run.launcher_log, rank)

        return start_each(partial(start_rank, rank) for rank in range(plan.nprocs))

    def close(self) -> None:
        """Do nothing: no process outlives its run."""

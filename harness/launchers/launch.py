"""``launch``: one fresh Python interpreter per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.launchers.base import OwnProcess, Process, import_path, rank_command, rank_environment
from harness.plan import RunPlan
from harness.rundir import RunDir


class LaunchLauncher:
    """Starts ``python -m harness.rank`` once per rank."""

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Start the ranks; a rank redirects its own output once it runs."""
        common = {**environment, "PYTHONPATH": import_path(plan.sys_path)}
        return [
            OwnProcess(rank_command(run), rank_environment(common, rank, plan.nprocs), plan.cwd, run.engine_log, rank)
            for rank in range(plan.nprocs)
        ]

    def close(self) -> None:
        """Do nothing: no process outlives its run."""

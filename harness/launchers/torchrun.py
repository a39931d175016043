"""``torchrun``: the same ranks under torch's own elastic engine."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.launchers.base import OwnProcess, Process, import_path
from harness.plan import RunPlan
from harness.rundir import RunDir


class TorchrunLauncher:
    """Starts one engine, which starts the ranks; it finds its peers through a file, so that nothing listens."""

    def __init__(self, max_restarts: int = 0, rendezvous: Sequence[str] = ()) -> None:
        self.max_restarts = max_restarts
        self.rendezvous = list(rendezvous)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Start the engine."""
        common = {**environment, "PYTHONPATH": import_path(plan.sys_path)}
        command = [sys.executable, "-m", "harness.launchers.engine", str(run.path)]
        command += [f"--nproc-per-node={plan.nprocs}", f"--max-restarts={self.max_restarts}"]
        command += self.rendezvous or self._file_rendezvous()
        command += ["-m", "harness.rank", str(run.path)]
        return [OwnProcess(command, common, plan.cwd, run.engine_log)]

    def _file_rendezvous(self) -> list[str]:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="harness-")
        store = Path(self._folder.name) / "rendezvous"
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint={store}", "--rdzv-conf=store_type=file", "--rdzv-id=harness"]

    def close(self) -> None:
        """Remove the rendezvous folder."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

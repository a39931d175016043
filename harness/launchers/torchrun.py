"""``torchrun``: the same ranks under torch's own elastic engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.environ import UNSHARED
from harness.launchers.base import OwnProcess, Process, module_command
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
        folder = self._new_folder()
        options = [f"--nproc-per-node={plan.nprocs}", f"--max-restarts={self.max_restarts}", f"--log-dir={folder}"]
        options += self.rendezvous or _file_rendezvous(folder)
        rank = module_command("harness.launchers.witness", str(run.path))
        command = module_command("harness.launchers.engine", *options, "--no-python", *rank)
        if not self.rendezvous:
            # Its ranks have our store; one of its own would listen on every interface.
            environment = {**environment, UNSHARED: "1"}
        return [OwnProcess(command, environment, plan.cwd, run.engine_log)]

    def _new_folder(self) -> Path:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="harness-")
        return Path(self._folder.name)

    def close(self) -> None:
        """Remove the folder of rendezvous and engine."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _file_rendezvous(folder: Path) -> list[str]:
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={folder / 'rendezvous'}",
        "--rdzv-conf=store_type=file",
        "--rdzv-id=harness",
    ]

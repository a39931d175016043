"""``torchrun``: the same ranks under torch's own elastic agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.launchers.base import Process, module_command
from harness.launchers.local import OwnProcess
from harness.run.environment import UNSHARED
from harness.run.folder import RunDir
from harness.run.plan import RunPlan


class TorchrunLauncher:
    """Starts one agent, which starts the ranks; it finds its peers through a file, so that nothing listens."""

    def __init__(self, rendezvous: Sequence[str] = ()) -> None:
        self.rendezvous = list(rendezvous)

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Start the agent; its files lie in the run's temporary folder."""
        folder = run.temp_dir.read_text()
        options = [f"--nproc-per-node={plan.nprocs}", f"--max-restarts={plan.max_restarts}", f"--log-dir={folder}"]
        options += self.rendezvous or _file_rendezvous(folder)
        rank = module_command("harness.launchers.torchrun_worker", str(run.path))
        # --no-python: torch would start a script without the flags that module_command() has put there.
        command = module_command("harness.launchers.torchrun_agent", *options, "--no-python", *rank)
        if not self.rendezvous:
            # Its ranks have our store; one of its own would listen on every interface.
            environment = {**environment, UNSHARED: "1"}
        return [OwnProcess(command, environment, plan.cwd, run.launcher_log)]

    def close(self) -> None:
        """Do nothing: the agent ends with its run."""


def _file_rendezvous(folder: str) -> list[str]:
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={folder}/rendezvous",
        "--rdzv-conf=store_type=file",
        "--rdzv-id=harness",
    ]

"""Hydra's launcher plugin: ``hydra/launcher=harness`` starts an app's function in every rank.

Hydra imports this file at each start of each of its apps, so it imports what it needs only when it is used.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher

from harness.config import incomplete, register
from harness.errors import unwritable

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

# At once: Hydra composes the launcher's settings before it makes the launcher.
register()


class HarnessLauncher(Launcher):
    """Starts the ranks of each job of a sweep. Its settings are those of :data:`harness.config.PluginConf`."""

    def __init__(self, **settings: Any) -> None:
        # Interpolations may give each job its own settings, so they are read job by job.
        del settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra hands over before the first launch."""
        self._context = hydra_context
        self._task_function = task_function
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs one after another and return what rank 0 of each returned.

        Raises:
            CompactHydraException: A setting of any job is wrong; no rank has been started.
        """
        from harness.entrypoints.hydra_jobs import launch

        return launch(self._context, self._config, self._task_function, job_overrides, initial_job_idx)


def _as_multirun(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a multirun that has the folder of the single run, where one was given."""
    moved = [f"hydra.sweep.dir={a.partition('=')[2]}" if a.startswith("hydra.run.dir=") else a for a in arguments]
    # A multirun gives each job a folder of its own below this one; here the two are the same.
    return [*moved, *(["hydra.sweep.subdir=."] if moved != list(arguments) else []), "--multirun"]


class NeverBypassed(Callback):
    """Sees to it that a single process never passes for N ranks: Hydra uses no launcher outside of a multirun.

    Hydra turns an Exception from a callback into a warning, but not a SystemExit: what is refused is printed, and the command
    exits. Tests that refuse ``hydra.mode=RUN`` and a single run's settings fail where Hydra comes to do otherwise.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the same command again as a multirun; end it where the user has asked for a single run."""
        # Python's own words (-m module, -X ...) come before the app's, which end sys.orig_argv as they are in sys.argv.
        if {"hydra.mode=RUN", "--run", "-r"}.isdisjoint(sys.argv):
            # By now Hydra is set on a single run; a new start in place of this process keeps terminal and exit status.
            os.execv(
                sys.executable, [sys.executable, *sys.orig_argv[1 : -len(sys.argv[1:]) or None], *_as_multirun(sys.argv[1:])]
            )
        nprocs = config.hydra.launcher.nprocs
        print(f"hydra.mode=RUN bypasses the launcher: nprocs={nprocs} would be one process. Leave it out.", file=sys.stderr)
        sys.exit(1)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """End the command where Hydra would fail with all its frames: a setting is missing, or the folder takes no file."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            OmegaConf.to_container(config.hydra.launcher, resolve=True, throw_on_missing=True)
            # To read it resolves what it is made of, such as ${now:...}.
            str(config.hydra.sweep.dir)
        except OmegaConfBaseException as error:
            sys.exit(incomplete(error))
        _require_writable(Path(str(config.hydra.sweep.dir)))


def _require_writable(folder: Path) -> None:
    """End the command where Hydra, which writes there before it asks the launcher, cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # More than Hydra writes there: a disk that has no room says so only now.
            file.write(bytes(2**16))
    except OSError as error:
        sys.exit(unwritable(error, folder))

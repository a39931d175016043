"""A job as Hydra composes it: resolved once, in this process, and written into its folder for the ranks."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from harness.run.folder import RunDir, write_whole


@dataclass(frozen=True)
class Composed:
    """One job as Hydra composed it; all that can be resolved is."""

    number: int
    overrides: Sequence[str]
    config: DictConfig

    @property
    def folder(self) -> Path:
        """The job's folder."""
        return Path(self.config.hydra.runtime.output_dir)

    def task_config(self) -> DictConfig:
        """Return what the app's function gets."""
        config = self.config.copy()
        # Hydra locks what it has composed: without this, a key can be neither added nor taken away.
        with read_write(config), open_dict(config):
            del config["hydra"]
        return config


def compose(context: HydraContext, config: DictConfig, overrides: Sequence[str], number: int) -> Composed:
    """Return one job, with its folder fixed and every interpolation resolved that this process can resolve."""
    job = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(job):
        # As Hydra's own launcher does, and before anything is resolved that may refer to them.
        job.hydra.job.id = str(number)
        job.hydra.job.num = number
        if job.hydra.job.chdir is None:
            # As Hydra itself decides it, by the app's version_base.
            job.hydra.job.chdir = not version.base_at_least("1.2")
    # Each time: the resolver hydra: reads what was set last, and the next step needs what this one has added.
    HydraConfig.instance().set_config(job)
    # Fixed before the rest is resolved, as ${hydra:runtime.output_dir} may stand anywhere in it.
    folder = os.path.abspath(os.path.join(str(job.hydra.sweep.dir), str(job.hydra.sweep.subdir)))
    with read_write(job.hydra.runtime), open_dict(job.hydra.runtime):
        job.hydra.runtime.output_dir = folder
    HydraConfig.instance().set_config(job)
    resolve(job.hydra)
    HydraConfig.instance().set_config(job)
    resolve(job)
    HydraConfig.instance().set_config(job)
    return Composed(number, list(overrides), job)


def resolve(node: Any) -> None:
    """Replace each interpolation by its value; one that cannot be resolved stays, and fails where it is read, as ever."""
    # Not OmegaConf.resolve(), which ends at the first that cannot be resolved.
    with read_write(node), open_dict(node):
        for key in list(range(len(node))) if isinstance(node, ListConfig) else list(node.keys()):
            # To read what is missing is an error, and an app that never reads it needs no value.
            if OmegaConf.is_missing(node, key):
                continue
            if OmegaConf.is_interpolation(node, key):
                _put_value(node, key)
            elif OmegaConf.is_config(node[key]):
                resolve(node[key])


def _put_value(node: Any, key: Any) -> None:
    try:
        # Reading resolves; what is written back is no interpolation any more.
        value = node[key]
        node[key] = value
    except OmegaConfBaseException:
        return
    # OmegaConf stores a copy of a node that is assigned: the copy has to be resolved.
    if OmegaConf.is_config(value):
        resolve(node[key])


def write_folder(composed: Composed) -> None:
    """Write what Hydra itself writes for a job, and for the ranks Hydra's own settings and what an app's function gets.

    The harness's own training gets nothing here: ``plan.json`` says all of it.
    """
    composed.folder.mkdir(parents=True, exist_ok=True)
    hydra = DictConfig({"hydra": composed.config.hydra})
    # null is how Hydra's users switch these files off.
    if composed.config.hydra.output_subdir is not None:
        beside = composed.folder / composed.config.hydra.output_subdir
        beside.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(composed.task_config(), beside / "config.yaml")
        OmegaConf.save(hydra, beside / "hydra.yaml")
        OmegaConf.save(composed.config.hydra.overrides.task, beside / "overrides.yaml")
    # Pickled rather than written as YAML: a value may be of a class that the app's schema defines.
    task = composed.task_config() if composed.config.hydra.launcher.train is None else None
    content = pickle.dumps({"task": task, "hydra": composed.config})
    write_whole(RunDir(composed.folder).config, content)


def settings_of(config: DictConfig) -> dict[str, Any]:
    """Return the plugin's own settings as plain data."""
    settings = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(settings, dict)
    return {str(name): value for name, value in settings.items()}

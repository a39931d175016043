"""The typed schema of ``conf/`` and of the plugin, in Hydra's ConfigStore. Each field's comment is its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class PluginConf:
    """``hydra/launcher=harness`` in any Hydra app: start the app's function in every rank."""

    _target_: str = "hydra_plugins.harness_launcher.HarnessLauncher"
    _recursive_: bool = False  # a recipe's _target_ is for the ranks to make
    nprocs: int = -1  # ranks; -1: every visible accelerator, else every usable core
    method: str = "spawn"  # spawn, launch, torchrun, inline
    start_method: str = "forkserver"  # of spawn: forkserver, spawn, fork
    backend: str = "auto"  # auto, gloo, nccl, bkcl
    devices: Any = None  # absolute ids with commas between, for nccl and bkcl
    threads: Any = "auto"  # of the math libraries per rank; auto: the cores shared out, or OMP_NUM_THREADS
    timeout_s: float | None = None  # silence after which ranks count as hung; null waits for ever
    grace_s: float = 1.0  # from SIGTERM to SIGKILL
    train: Any = None  # settings of the harness's own training loop; null for anybody else's task
    choices: Any = None  # name of a column -> chosen option, for the tables
    report: Any = None  # what shows the results


@dataclass
class LauncherConf:
    """Group ``launcher``: how ranks start."""

    name: str = MISSING
    start_method: str = "forkserver"
    timeout_s: float | None = 600.0
    grace_s: float = 1.0


@dataclass
class BackendConf:
    """Group ``backend``: device and process group."""

    name: str = MISSING
    devices: Any = None


@dataclass
class CompareConf:
    """Group ``compare``: how the ranks' training is verified."""

    tier: str = MISSING
    on_mismatch: str = "stop"  # stop or warn


@dataclass
class ReportConf:
    """Group ``report``: what shows the results."""

    reporters: Any = field(default_factory=dict)  # name -> class (_target_) and its arguments; null leaves one out


@dataclass
class Conf:
    """The whole configuration of ``run.py``."""

    launcher: LauncherConf = field(default_factory=LauncherConf)
    backend: BackendConf = field(default_factory=BackendConf)
    recipe: Any = MISSING
    compare: CompareConf = field(default_factory=CompareConf)
    report: ReportConf = field(default_factory=ReportConf)
    nprocs: int = -1
    global_batch_size: int = 64
    steps: int | None = 100
    epochs: int | None = None
    seed: int = 0
    precision: str = "float32"
    threads: Any = "auto"
    num_workers: int = 0
    grad_accumulation: int = 1
    clip_norm: float | None = None
    sync_bn: bool = False
    on_nonfinite: str = "stop"
    eval_every: int = 0
    log_every: int = 10
    warmup_steps: int = 3
    checkpoint_every: int = 0
    resume: str | None = None
    deterministic: bool = True
    find_unused_parameters: bool = False


def register() -> None:
    """Put the schemas where Hydra finds them."""
    store = ConfigStore.instance()
    # Hydra ignores launchers outside of a multirun; the callback notices.
    node = {
        "hydra": {
            "launcher": PluginConf,
            "callbacks": {"harness": {"_target_": "hydra_plugins.harness_launcher.NeverBypassed"}},
        }
    }
    store.store(group="hydra/launcher", name="harness", node=node, package="_global_", provider="harness")
    store.store(name="harness_schema", node=Conf, provider="harness")
    store.store(group="launcher", name="schema", node=LauncherConf, provider="harness")
    store.store(group="backend", name="schema", node=BackendConf, provider="harness")
    store.store(group="compare", name="schema", node=CompareConf, provider="harness")
    store.store(group="report", name="schema", node=ReportConf, provider="harness")

"""The typed schema of ``conf/`` and of the plugin, in Hydra's ConfigStore; each setting carries its line of ``--help``."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def setting(default: Any, text: str) -> Any:
    """Return a field with its default and its help."""
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass
class PluginConf:
    """``hydra/launcher=harness`` in any Hydra app: start the app's function in every rank."""

    _target_: str = "hydra_plugins.harness_launcher.HarnessLauncher"
    _recursive_: bool = False  # a recipe's _target_ is for the ranks to make
    nprocs: int = setting(-1, "ranks; -1: every visible accelerator, else every usable core")
    method: str = setting("spawn", "spawn, launch, torchrun, inline")
    start_method: str = setting("forkserver", "of spawn: forkserver, spawn, fork")
    backend: str = setting("auto", "auto, gloo, nccl, bkcl")
    devices: Any = setting(None, "absolute device ids with commas between, for nccl and bkcl")
    threads: Any = setting("auto", "of the math libraries per rank; auto: OMP_NUM_THREADS, else the cores shared out")
    timeout_s: float | None = setting(None, "silence after which ranks count as hung; null: wait for ever")
    grace_s: float = setting(1.0, "from SIGTERM to SIGKILL")
    train: Any = setting(None, "settings of harness's own training loop; null for anybody else's task")
    choices: Any = setting(None, "name of a column -> chosen option, for the tables")
    pairs: int = setting(0, "launches of each job for a claim of speed; 0: one launch, no claim")
    aa: bool = setting(False, "with pairs: launch twice as often, and hold each job against itself too")
    report: Any = setting(None, "what shows the results; null: failures, and a short table")


@dataclass
class LauncherConf:
    """How ranks start."""

    name: str = MISSING
    start_method: str = setting("forkserver", "of spawn: forkserver (a warm server), spawn, fork")
    timeout_s: float | None = setting(600.0, "seconds of silence after which ranks count as hung; null: wait for ever")
    grace_s: float = setting(1.0, "seconds from SIGTERM to SIGKILL")


@dataclass
class BackendConf:
    """Device and process group."""

    name: str = MISSING
    devices: Any = setting(None, "absolute ids with commas between, as in CUDA_VISIBLE_DEVICES; null: the first visible ones")


@dataclass
class CompareConf:
    """How the ranks' training is verified, before it starts."""

    tier: str = MISSING
    on_mismatch: str = setting("stop", "stop: a red check ends the job; warn: it goes on")
    pairs: int = setting(0, "launches of each job for a claim of speed, where jobs do the same work; 4, 10, 20")
    aa: bool = setting(
        False, "with pairs: launch twice as often and hold each job against itself too, to see what can be told apart"
    )


@dataclass
class DdpConf:
    """How torch's DDP reduces gradients."""

    bucket_cap_mb: float = setting(25.0, "MiB of the buckets in which gradients travel; 25: torch's own choice")
    gradient_as_bucket_view: bool = setting(False, "gradients live in the buckets: less memory, one copy fewer")
    static_graph: bool = setting(False, "every step uses the same parameters in the same way")
    find_unused_parameters: bool = setting(False, "for models that do not use every parameter in every step")
    wrap_one_rank: bool = setting(False, "DDP at nprocs=1 too, to see what it costs by itself")
    comm_hook: str = setting("none", "gradients travel compressed, not to the bit: none, fp16, bf16, powersgd")


@dataclass
class FaultConf:
    """A fault to inject into the ranks, to see that the checks catch it."""

    name: str | None = None
    size: float | None = setting(None, "how large; null: the smallest that must be caught")


@dataclass
class ReportConf:
    """What shows the results."""

    reporters: Any = setting(dict, "name -> class (_target_) and its arguments; null leaves one out")


@dataclass
class Conf:
    """The whole configuration of ``run.py``."""

    launcher: LauncherConf = setting(LauncherConf, "")
    backend: BackendConf = setting(BackendConf, "")
    recipe: Any = MISSING
    compare: CompareConf = setting(CompareConf, "")
    fault: FaultConf = setting(FaultConf, "")
    report: ReportConf = setting(ReportConf, "")
    nprocs: int = setting(-1, "ranks; -1: every visible accelerator, else every core this process may use")
    threads: Any = setting("auto", "of the math libraries per rank; auto: OMP_NUM_THREADS, else the cores shared out")
    global_batch_size: int = setting(64, "samples per step, over all ranks")
    steps: int | None = setting(100, "optimizer steps; null: count epochs")
    epochs: int | None = setting(None, "passes over the data, in place of steps")
    seed: int = setting(0, "of parameters, order, dropout, augmentation")
    precision: str = setting("float32", "float32, float64, bfloat16 (autocast)")
    num_workers: int = setting(0, "processes per rank that load data")
    grad_accumulation: int = setting(1, "pieces that a rank's part of a batch is cut into")
    clip_norm: float | None = setting(None, "largest norm of the whole gradient; null: no clipping")
    sync_bn: bool = setting(False, "BatchNorm over the global batch, on CPU and GPU")
    compile: bool = setting(False, "torch.compile of the model; needs a C++ compiler")
    ddp: DdpConf = setting(DdpConf, "")
    on_nonfinite: str = setting("stop", "a loss that is not finite: stop, or skip the step, on all ranks together")
    deterministic: bool = setting(True, "only kernels that repeat bit for bit, where torch has them")
    eval_every: int = setting(0, "steps between evaluations; 0: only at the end")
    log_every: int = setting(10, "steps between progress lines, where there is no terminal")
    profile: bool = setting(False, "traces of 10 steps after the warm-up, for Perfetto; slows these steps")
    warmup_steps: int = setting(3, "first steps that are timed and not counted")
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: none")
    resume: str | None = setting(None, "checkpoint, or folder of a job, to go on from")


GROUPS = {
    "How ranks start": ["launcher", "backend", "nprocs", "threads"],
    "Training": [
        *("recipe", "global_batch_size", "steps", "epochs", "seed", "precision", "num_workers", "grad_accumulation"),
        *("clip_norm", "sync_bn", "on_nonfinite", "deterministic", "compile", "ddp"),
    ],
    "Evaluation, checkpoints": ["eval_every", "checkpoint_every", "resume"],
    "Proof": ["compare", "fault"],
    "Output": ["report", "log_every", "profile", "warmup_steps"],
}
"""Heading -> settings, in the order of ``--help``."""


def help_text(*, _root_: DictConfig) -> str:
    """Return the body of ``--help``: each setting with its value as composed and what it does."""
    lines = []
    for heading, names in GROUPS.items():
        lines += ["", heading]
        for name in names:
            lines += _help_of(name, _root_)
    return "\n".join(lines)


def _help_of(name: str, root: DictConfig) -> list[str]:
    fields = {field.name: field for field in dataclasses.fields(Conf)}
    value = OmegaConf.select(root, name)
    if not OmegaConf.is_config(value):
        return [_line(f"{name}={_shown(value)}", fields[name].metadata["help"])]
    chosen = OmegaConf.select(root, f"hydra.runtime.choices.{name}")
    inner = _SCHEMAS.get(name)
    title = (inner.__doc__ or "").splitlines()[0] if inner else f"{value.get('_target_', '')}: what is trained"
    texts = {f.name: f.metadata.get("help") for f in dataclasses.fields(inner)} if inner else _comments(root, name, chosen)
    lines = [_line(name if chosen is None else f"{name}={chosen}", title)]
    for key in value:
        if key not in ("name", "tier", "_target_") and not OmegaConf.is_config(value[key]):
            lines.append(_line(f"  {name}.{key}={_shown(value[key])}", texts.get(key) or ""))
    return lines


def _comments(root: DictConfig, group: str, option: str) -> dict[str, str]:
    """Return key -> comment of a group's option, from the first folder of the search path that has its file."""
    for source in OmegaConf.select(root, "hydra.runtime.config_sources") or []:
        path = Path(str(source.path)) / group / f"{option}.yaml"
        if source.schema == "file" and path.exists():
            found = re.findall(r"^\s*(\w+):[^#\n]*#\s*(.+)$", path.read_text(), re.MULTILINE)
            return dict(found)
    return {}


def _line(left: str, right: str) -> str:
    return f"  {left:<36} {right}".rstrip()


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


_SCHEMAS: dict[str, Any] = {
    "launcher": LauncherConf,
    "backend": BackendConf,
    "compare": CompareConf,
    "fault": FaultConf,
    "ddp": DdpConf,
    "report": ReportConf,
}


_own_folders: dict[str, str] = {}


def own_folder(path: str) -> str:
    """Return ``path``, or with a number behind it, as a new folder that no other command has: the same one at every call.

    Raises:
        SystemExit: No folder can be made there.
    """
    if path not in _own_folders:
        taken, number = path, 1
        while True:
            try:
                Path(taken).mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
                taken = f"{path}-{number}"
            except OSError as error:
                # Within an interpolation any other exception would come out as pages of Hydra's and OmegaConf's frames.
                sys.exit(f"{path} cannot be made: {error.strerror}. hydra.sweep.dir=FOLDER takes another.")
        _own_folders[path] = taken
    return _own_folders[path]


def incomplete(error: OmegaConfBaseException) -> str:
    """Return what to say of a setting that is missing, or that refers to what is."""
    return f"The configuration is incomplete: {str(error).splitlines()[0]} ({error.full_key}). No rank was started."


def refuse_nameless(arguments: Sequence[str], conf: Path) -> None:
    """End the command where a group of ``conf`` is given a number, ``null`` or a truth value, which Hydra fails on with frames.

    Raises:
        SystemExit: With the options that there are.
    """
    for argument in arguments:
        group, _, value = argument.partition("=")
        options = sorted(path.stem for path in (conf / group).glob("*.yaml")) if group.isidentifier() else []
        if options and any(_NAMELESS.fullmatch(choice) for choice in value.split(",")):
            sys.exit(f"{argument} names no option of {group}: {', '.join(options)}. No rank was started.")


_NAMELESS = re.compile(r"\s*(null|true|false|[+-]?\d[\d_.e+-]*)\s*", re.IGNORECASE)


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
    OmegaConf.register_new_resolver("harness_help", help_text, replace=True)
    OmegaConf.register_new_resolver("harness_own_folder", own_folder, replace=True)

"""RunPlan: all that is to happen in one run, as frozen, plain data; what a rank is told, it is told by this."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.errors import WORDS
from harness.run import faults
from harness.run.folder import RunDir, write_json
from harness.run.record import FORMAT, check_format

METHODS = ("spawn", "launch", "torchrun", "inline")
BACKENDS = ("auto", "gloo", "nccl", "bkcl")
PRECISIONS = ("float32", "float64", "bfloat16")
TIERS = ("quick", "full", "audit", "off")
START_METHODS = ("forkserver", "spawn", "fork")
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")


@dataclass(frozen=True)
class Task:
    """What every rank does.

    Attributes:
        kind: ``hydra`` (a Hydra app's function with its configuration), ``call`` (a pickled function and its arguments),
            ``script`` (a file run as ``__main__``) or ``module`` (the same, by name).
        main_path: File of the parent's ``__main__``, loaded in the rank without its main guard; None without one.
        main_module: The same by module name, where the parent was started by ``python -m``.
        module: Where a name leads to the function, for ``hydra``; the module to run, for ``module``.
        name: Qualified name of the function, for ``hydra``.
        line: First line of the function.
        attribute: The name in ``module`` that leads to the function, under whatever decorators.
        index: How many decorators, and what else they hold, come before it.
        path: The script, for ``script``.
        arguments: Of the script or module.
    """

    kind: Literal["hydra", "call", "script", "module"]
    main_path: str | None = None
    main_module: str | None = None
    module: str = ""
    name: str = ""
    line: int = 0
    attribute: str = ""
    index: int = 0
    path: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ddp:
    """How torch's DDP reduces gradients.

    Attributes:
        bucket_cap_mb: Size in MiB of the buckets in which gradients travel; 25 is torch's default, with a small one of 1.
        wrap_one_rank: Whether a single rank gets DDP too.
        comm_hook: How they are compressed on their way: ``none``, ``fp16``, ``bf16`` or ``powersgd``.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    wrap_one_rank: bool = False
    comm_hook: str = "none"

    def checks(self) -> list[tuple[bool, str]]:
        """Return pairs of (is wrong, what to say of it)."""
        return [
            (not self.bucket_cap_mb > 0, f"ddp.bucket_cap_mb={self.bucket_cap_mb} must be above 0 MiB."),
            (self.comm_hook not in COMM_HOOKS, f"ddp.comm_hook={self.comm_hook} is unknown; use {', '.join(COMM_HOOKS)}."),
            (
                self.static_graph and self.find_unused_parameters,
                "ddp.static_graph=true says that every step uses the same parameters, and ddp.find_unused_parameters=true that "
                "steps differ. Use one of them.",
            ),
        ]


@dataclass(frozen=True)
class TrainPlan:
    """The training of one recipe. ``steps`` or ``epochs`` says how long; sizes count samples over all ranks.

    ``reference`` names the evidence of an earlier run of the same training, whose replay stands for this one's wherever the
    ranks captured the same bits. ``stop_after`` is the number of steps after which to leave the rest to a run that resumes.
    """

    recipe: Mapping[str, Any]
    global_batch_size: int = 64
    steps: int | None = 100
    epochs: int | None = None
    seed: int = 0
    precision: str = "float32"
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
    stop_after: int | None = None
    deterministic: bool = True
    profile: bool = False
    compile: bool = False
    ddp: Ddp = field(default_factory=Ddp)
    compare: str = "off"
    on_mismatch: str = "stop"
    reference: str | None = None
    fault: str | None = None
    fault_size: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainPlan:
        """Return the plan of resolved settings, in which ``steps`` gives way to ``epochs``."""
        values = dict(config)
        if values.get("epochs") is not None:
            values["steps"] = None
        return cls(**{**values, "ddp": Ddp(**values.get("ddp", {}))})

    def problems(self, nprocs: int) -> list[str]:
        """Return a sentence for each setting, or pair of settings, that cannot work with ``nprocs`` ranks."""
        return [sentence for wrong, sentence in self._checks(nprocs) if wrong] + faults.problems(self, nprocs)

    def _checks(self, nprocs: int) -> list[tuple[bool, str]]:
        size = self.global_batch_size
        return [
            *self.ddp.checks(),
            (not self.recipe.get("_target_"), "recipe has no _target_: name its class, as conf/recipe/mnist.yaml does."),
            (size < 1, f"global_batch_size={size} must be at least 1."),
            (
                1 <= size < nprocs,
                f"global_batch_size={size} leaves {nprocs - size} of nprocs={nprocs} ranks without a sample in every step. "
                f"Use global_batch_size={nprocs} or more, or nprocs={size}.",
            ),
            (self.steps is not None and self.steps < 1, f"steps={self.steps} must be at least 1."),
            (self.epochs is not None and self.epochs < 1, f"epochs={self.epochs} must be at least 1, or null to count steps."),
            (self.steps is None and self.epochs is None, "steps=null needs epochs: set steps=100 or epochs=1."),
            (self.seed < 0, f"seed={self.seed} must be 0 or more."),
            (self.num_workers < 0, f"num_workers={self.num_workers} must be 0 or more."),
            (self.precision not in PRECISIONS, f"precision={self.precision} is unknown; use {', '.join(PRECISIONS)}."),
            (self.grad_accumulation < 1, f"grad_accumulation={self.grad_accumulation} must be at least 1."),
            (
                self.grad_accumulation > 1 and size >= nprocs and size // nprocs < self.grad_accumulation,
                f"grad_accumulation={self.grad_accumulation} cuts a rank's {size // nprocs} samples of a step "
                f"(global_batch_size={size}, nprocs={nprocs}) into more pieces than there are. "
                f"Use global_batch_size={nprocs * self.grad_accumulation} or more.",
            ),
            (self.clip_norm is not None and not self.clip_norm > 0, f"clip_norm={self.clip_norm} must be above 0, or null."),
            (self.on_nonfinite not in ("stop", "skip"), f"on_nonfinite={self.on_nonfinite} must be stop or skip."),
            (self.eval_every < 0, f"eval_every={self.eval_every} must be 0 (only at the end) or more."),
            (self.log_every < 1, f"log_every={self.log_every} must be at least 1."),
            (self.warmup_steps < 0, f"warmup_steps={self.warmup_steps} must be 0 or more."),
            (self.compare not in TIERS, f"compare={self.compare} is unknown; use {', '.join(TIERS)}."),
            (self.on_mismatch not in ("stop", "warn"), f"compare.on_mismatch={self.on_mismatch} must be stop or warn."),
            (self.checkpoint_every < 0, f"checkpoint_every={self.checkpoint_every} must be 0 (none) or more."),
        ]


@dataclass(frozen=True)
class Trial:
    """One launch of a comparison of launchers.

    Attributes:
        order: Among all launches of the comparison, from 0.
        pair: The pair that it belongs to.
        replaces: The disturbed pair that this one repeats; None for a first attempt.
        aa: Whether a job's launches are to be compared among themselves too.
        among: Number of the first of the jobs that were launched in turn; None in records that do not tell.
    """

    order: int
    pair: int
    replaces: int | None = None
    aa: bool = False
    among: int | None = None


@dataclass(frozen=True)
class RunPlan:
    """One run.

    Attributes:
        job: Number of the job within its sweep.
        method: Which launcher starts the ranks.
        start_method: How ``spawn`` makes a process: ``forkserver``, ``spawn`` or ``fork``.
        backend: Resolved, never ``auto``; empty where the task joins a process group by itself or not at all.
        backend_reason: Why ``auto`` came to it.
        device: Type of device of every rank: ``cpu``, ``cuda`` or ``xpu``.
        devices: Absolute ids of the ranks' devices, in rank order; empty on the CPU.
        threads: Of the math libraries, per rank.
        timeout_s: Silence after which ranks count as hung; None waits for ever.
        grace_s: From SIGTERM to SIGKILL.
        cwd, sys_path, argv: As the parent has them.
        settings: Environment variables of the job, on top of the parent's.
        master_port: Of the rendezvous store on loopback; None for one that the system chooses.
        max_restarts: How often torch's agent starts all ranks again after a failure.
        num_machines: That take part; above 1, torch's agent finds the others, and files count this machine's ranks from 0.
        trial: Its place in a comparison of launchers; None for a job's own run.
        train: What the harness's own training loop does; None for anybody else's task.
        door: By which it was asked for, and in whose words it speaks of settings: ``hydra``, ``spawn`` or ``command``.
    """

    task: Task
    job: int = 0
    method: str = "spawn"
    start_method: str = "forkserver"
    nprocs: int = 1
    backend: str = ""
    backend_reason: str = ""
    device: str = "cpu"
    devices: tuple[str, ...] = ()
    threads: int = 1
    timeout_s: float | None = None
    grace_s: float = 1.0
    cwd: str = ""
    sys_path: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    master_port: int | None = None
    max_restarts: int = 0
    num_machines: int = 1
    trial: Trial | None = None
    train: TrainPlan | None = None
    door: str = "hydra"

    @property
    def words(self) -> Mapping[str, str]:
        """Setting -> what whoever asked for this run types for it."""
        return WORDS[self.door]

    def overwrites_its_start(self, run: RunDir) -> bool:
        """Return True where a training in this folder goes on from a checkpoint that its own then takes the place of."""
        if self.train is None or self.train.resume is None or not self.train.checkpoint_every:
            return False
        start = Path(self.cwd, self.train.resume).resolve()
        return start in (run.path.resolve(), run.checkpoint.resolve())

    def write(self, run: RunDir) -> None:
        """Write ``plan.json``."""
        write_json(run.plan, {"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def read(cls, run: RunDir) -> RunPlan:
        """Return the plan of a run's folder.

        Raises:
            NotComparable: A newer harness has written it.
        """
        data = json.loads(run.plan.read_text())
        check_format(data, run.plan)
        del data["format"]
        task = dict(data.pop("task"))
        task["arguments"] = tuple(task["arguments"])
        train, trial = data.pop("train"), data.pop("trial")
        for name in ("devices", "sys_path", "argv"):
            data[name] = tuple(data[name])
        data["trial"] = Trial(**trial) if trial else None
        data["train"] = TrainPlan.from_config(train) if train else None
        return cls(task=Task(**task), **data)

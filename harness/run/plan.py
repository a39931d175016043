"""RunPlan: all that is to happen in one run, as frozen, plain data; what a rank is told, it is told by this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.errors import WORDS
from harness.run import faults
from harness.run.folder import RunDir, read_json, write_json
from harness.run.record import FORMAT, check_format
from harness.run.setting import MISSING, out_of_bounds, setting

BACKENDS = ("auto", "gloo", "nccl", "bkcl")
PRECISIONS = ("float32", "float64", "bfloat16")
TIERS = ("quick", "full", "audit", "off")
START_METHODS = ("forkserver", "spawn", "fork")
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
MOST = 10**12
"""Steps or epochs: more would outlast every machine."""


@dataclass(frozen=True)
class Task:
    """What every rank does.

    Attributes:
        kind: ``train`` (the harness's own training, of which the plan alone says what), ``hydra`` (a Hydra app's function with
            its configuration), ``call`` (a pickled function and its arguments),
            ``script`` (a file run as ``__main__``) or ``module`` (the same, by name).
        main_path: File of the parent's ``__main__``, loaded in the rank without its main guard; None without one.
        main_module: The same by module name, where the parent was started by ``python -m``.
        module: Where a name leads to the function, for ``hydra`` and ``train``; the module to run, for ``module``.
        name: Qualified name of the function, for ``hydra`` and ``train``.
        line: First line of the function.
        attribute: The name in ``module`` that leads to the function, under whatever decorators.
        index: How many decorators, and what else they hold, come before it.
        path: The script, for ``script``.
        arguments: Of the script or module.
    """

    kind: Literal["train", "hydra", "call", "script", "module"]
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
    """How torch's DDP reduces gradients."""

    bucket_cap_mb: float = setting(
        25.0, "MiB of the buckets in which gradients travel; 25: torch's own choice", above=0, words=" MiB", at_most=2**20
    )
    gradient_as_bucket_view: bool = setting(False, "gradients live in the buckets: less memory, one copy fewer")
    static_graph: bool = setting(False, "every step uses the same parameters in the same way")
    find_unused_parameters: bool = setting(False, "for models that do not use every parameter in every step")
    wrap_one_rank: bool = setting(False, "DDP at nprocs=1 too, to see what it costs by itself")
    comm_hook: str = setting(
        "none", f"gradients travel compressed, not to the bit: {', '.join(COMM_HOOKS)}", choices=COMM_HOOKS
    )

    def checks(self) -> list[tuple[bool, str]]:
        """Return pairs of (is wrong, what to say of it) for settings that exclude each other."""
        return [
            (
                self.static_graph and self.find_unused_parameters,
                "ddp.static_graph=true says that every step uses the same parameters, and ddp.find_unused_parameters=true that "
                "steps differ. Use one of them.",
            ),
        ]


@dataclass(frozen=True)
class TrainPlan:
    """The training of one recipe. ``steps`` or ``epochs`` says how long; sizes count samples over all ranks.

    Its settings are those of ``run.py``, in the order of ``--help``; the other fields are set by the harness.

    Attributes:
        stop_after: Number of steps after which to leave the rest to a run that resumes.
        reference: Evidence of an earlier run of the same training, whose replay stands for this one's wherever the ranks
            captured the same bits.
    """

    recipe: Mapping[str, Any] = setting(heading="Training")
    global_batch_size: int = setting(64, "samples per step, over all ranks", at_least=1, at_most=2**31 - 1)
    steps: int | None = setting(
        100, "optimizer steps; null: count epochs; 0: only evaluate", at_least=0, at_most=MOST, words=" (only evaluate)"
    )
    epochs: int | None = setting(
        None, "passes over the data, in place of steps", at_least=1, at_most=MOST, or_null=", or null to count steps"
    )
    # torch.manual_seed() takes 64 bits.
    seed: int = setting(0, "of parameters, order, dropout, augmentation", at_least=0, at_most=2**64 - 1)
    precision: str = setting("float32", "float32, float64, bfloat16 (autocast)", choices=PRECISIONS)
    num_workers: int = setting(0, "processes per rank that load data", at_least=0, at_most=1024)
    grad_accumulation: int = setting(1, "pieces that a rank's part of a batch is cut into", at_least=1)
    clip_norm: float | None = setting(
        None, "largest norm of the whole gradient; null: no clipping", above=0, or_null=", or null"
    )
    sync_bn: bool = setting(False, "BatchNorm over the global batch, on CPU and GPU")
    on_nonfinite: str = setting(
        "stop", "a loss that is not finite: stop, or skip the step, on all ranks together", choices=("stop", "skip")
    )
    deterministic: bool = setting(True, "only kernels that repeat bit for bit, where torch has them")
    compile: bool = setting(False, "torch.compile of the model; needs a C++ compiler")
    ddp: Ddp = setting(Ddp)

    eval_every: int = setting(
        0,
        "steps between evaluations; 0: only at the end",
        heading="Evaluation, checkpoints",
        at_least=0,
        words=" (only at the end)",
    )
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: none", at_least=0, words=" (none)")
    resume: str | None = setting(None, "checkpoint, or folder of a job, to go on from")
    weights: str | None = setting(None, "weights to start from: a file, or folder of a job")
    weights_partial: bool = setting(False, "with weights: take over what matches, and say what")
    save_weights: bool = setting(True, "leave the trained model's weights in the job's folder")
    keep_best: str | None = setting(None, "metric of the evaluation by which to keep the best weights too, as accuracy")

    # The schema leaves it missing, as the option that is chosen for the group gives it.
    compare: str = setting("off", heading="Proof", path="compare.tier", schema=MISSING, choices=TIERS)
    on_mismatch: str = setting(
        "stop", "stop: a red check ends the job; warn: it goes on", path="compare.on_mismatch", choices=("stop", "warn")
    )
    fault: str | None = setting(None, path="fault.name")
    fault_size: float | None = setting(None, "how large; null: the smallest that must be caught", path="fault.size")

    log_every: int = setting(10, "steps between progress lines, where there is no terminal", heading="Output", at_least=1)
    profile: bool = setting(False, "traces of 10 steps after the warm-up, for Perfetto; slows these steps")
    warmup_steps: int = setting(3, "first steps that are timed and not counted", at_least=0)

    stop_after: int | None = None
    reference: str | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TrainPlan:
        """Return the plan of resolved settings, in which ``steps`` gives way to ``epochs``."""
        values = dict(config)
        # steps has a default, so that whoever sets epochs alone has both.
        if values.get("epochs") is not None:
            values["steps"] = None
        return cls(**{**values, "ddp": Ddp(**values.get("ddp", {}))})

    def problems(self, nprocs: int) -> list[str]:
        """Return a sentence for each setting, or pair of settings, that cannot work with ``nprocs`` ranks."""
        checks = [*self.ddp.checks(), *self._checks(nprocs)]
        together = [sentence for wrong, sentence in checks if wrong]
        return [*out_of_bounds(self.ddp, "ddp."), *out_of_bounds(self), *together, *faults.problems(self, nprocs)]

    def _checks(self, nprocs: int) -> list[tuple[bool, str]]:
        size = self.global_batch_size
        return [
            (not self.recipe.get("_target_"), "recipe has no _target_: name its class, as conf/recipe/mnist.yaml does."),
            (
                # A size below 1 is told by its bounds.
                1 <= size < nprocs,
                f"global_batch_size={size} leaves {nprocs - size} of nprocs={nprocs} ranks without a sample in every step. "
                f"Use global_batch_size={nprocs} or more, or nprocs={size}.",
            ),
            (
                self.weights is not None and self.resume is not None,
                f"weights={self.weights} starts a training, and resume={self.resume} goes on with one: give one of them.",
            ),
            (
                self.steps == 0 and self.resume is not None,
                f"steps=0 only evaluates, and resume={self.resume} goes on training: use weights={self.resume}.",
            ),
            (self.steps is None and self.epochs is None, "steps=null needs epochs: set steps=100 or epochs=1."),
            (
                # A rank without any sample is told above.
                self.grad_accumulation > 1 and size >= nprocs and size // nprocs < self.grad_accumulation,
                f"grad_accumulation={self.grad_accumulation} cuts a rank's {size // nprocs} samples of a step "
                f"(global_batch_size={size}, nprocs={nprocs}) into more pieces than there are. "
                f"Use global_batch_size={nprocs * self.grad_accumulation} or more.",
            ),
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
        # Resolved, as a link may lead to the same file.
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
        data = read_json(run.plan)
        check_format(data, run.plan)
        del data["format"]
        task = dict(data.pop("task"))
        task["arguments"] = tuple(task["arguments"])
        train, trial = data.pop("train"), data.pop("trial")
        if train and task["kind"] == "hydra":
            # As older records name the harness's own training.
            task |= {"kind": "train", "module": "harness.train", "name": "train", "attribute": "", "line": 0, "index": 0}
        # JSON knows lists alone, and a plan that is read equals the one that was written.
        for name in ("devices", "sys_path", "argv"):
            data[name] = tuple(data[name])
        data["trial"] = Trial(**trial) if trial else None
        data["train"] = TrainPlan.from_config(train) if train else None
        return cls(task=Task(**task), **data)

"""What a run is asked for, at whichever door: checked as a whole, placed, and turned into a plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from harness.errors import WORDS, ConfigError, Problem, WrongSettings
from harness.launchers import registry
from harness.run.environment import current_folder, usable_cores, wanted_threads
from harness.run.launch_methods import traits_of
from harness.run.launch_settings import LaunchSettings, SweepSettings
from harness.run.placement import Placement, place
from harness.run.plan import RunPlan, Task, TrainPlan
from harness.run.setting import settings_of

Answer = TypeVar("Answer")
_BACKEND_OF = {"cuda": "nccl", "xpu": "bkcl"}
"""Type of device -> the backend that it takes."""


@dataclass(frozen=True)
class Settings:
    """Settings as asked for; what a door does not offer keeps its default.

    Attributes:
        door: ``hydra``, ``spawn`` or ``command``.
        devices: Absolute ids with commas between; None for the first visible ones.
        devices_word: What was typed for ``devices``, where a door has several words for it.
        device_type: That this word means; None for whichever the backend takes.
        sys_path: Where ranks look for modules; relative entries as they are here.
        variables: The environment of the job, on top of this process's.
        pairs: Launches of each job for a comparison.
        problems: What only the door could see.
    """

    task: Task
    door: str
    job: int = 0
    method: str = "spawn"
    start_method: str = "forkserver"
    nprocs: int = -1
    backend: str = "auto"
    devices: str | None = None
    devices_word: str | None = None
    device_type: str | None = None
    threads: int | str = "auto"
    timeout_s: float | None = None
    grace_s: float = 1.0
    sys_path: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    master_port: int | None = None
    max_restarts: int = 0
    num_machines: int = 1
    train: TrainPlan | None = None
    pairs: int = 0
    problems: Sequence[Problem | str] = ()

    @property
    def words(self) -> Mapping[str, str]:
        """Setting -> what is typed for it at this door."""
        return {**WORDS[self.door], **({"devices": self.devices_word} if self.devices_word else {})}


def plan_of(settings: Settings) -> RunPlan:
    """Return the plan of a run.

    Raises:
        ConfigError: Settings make no sense, alone or together; all of them are named, in the words of the door.
        BackendUnavailable: Nothing is wrong but that the backend cannot run here with that many ranks.
    """
    # A job's own variables count: one of them may say which devices are visible.
    environ = {**os.environ, **settings.variables}
    errors: list[WrongSettings] = [ConfigError(problem) for problem in _problems_of_start(settings)]
    if _is_not_whole(settings.nprocs):
        # Nothing further can be looked at: the rest of the checks count with it.
        raise _joined(errors, settings)
    placement = _try(lambda: _placed(settings, environ), errors)
    # Where the ranks cannot be placed, the other settings are still checked, with as many as were asked for.
    nprocs = placement.nprocs if placement else max(1, settings.nprocs)
    threads = _try(lambda: wanted_threads(environ, settings.threads, usable_cores(), nprocs), errors)
    cwd = _try(current_folder, errors)
    errors += [ConfigError(problem) for problem in (*_problems_of_training(settings, nprocs), *settings.problems)]
    if errors or placement is None or threads is None or cwd is None:
        raise _joined(errors, settings)
    return _plan(settings, placement, threads, cwd)


def _joined(errors: Sequence[WrongSettings], settings: Settings) -> WrongSettings:
    """Return one error in the words of the door; of a single one the kind is kept."""
    kind = type(errors[0]) if len(errors) == 1 else ConfigError
    error = kind(*(problem for each in errors for problem in each.problems))
    error.words = settings.words
    return error


def _try(ask: Callable[[], Answer], errors: list[WrongSettings]) -> Answer | None:
    try:
        return ask()
    except WrongSettings as error:
        errors.append(error)
        return None


def _plan(settings: Settings, placement: Placement, threads: int, cwd: str) -> RunPlan:
    return RunPlan(
        task=settings.task,
        door=settings.door,
        job=settings.job,
        method=settings.method,
        start_method=settings.start_method,
        nprocs=placement.nprocs,
        backend=placement.backend,
        backend_reason=placement.reason,
        device=placement.device,
        devices=placement.devices,
        threads=threads,
        timeout_s=settings.timeout_s,
        grace_s=settings.grace_s,
        cwd=cwd,
        # A rank may work in another folder, where a relative entry, or the empty one, would lead elsewhere.
        sys_path=tuple(os.path.abspath(entry) for entry in settings.sys_path),
        argv=tuple(sys.argv),
        settings=settings.variables,
        master_port=settings.master_port,
        max_restarts=settings.max_restarts,
        num_machines=settings.num_machines,
        train=settings.train,
    )


def _problems_of_start(settings: Settings) -> list[Problem]:
    checks = [
        (
            settings.method not in registry.LAUNCHERS,
            Problem(
                "launcher {name} (hydra.launcher.method) is unknown; use {known}.",
                name=settings.method,
                known=", ".join(registry.LAUNCHERS),
            ),
        ),
        (
            _is_not_whole(settings.nprocs),
            Problem("{nprocs}={count!r} must be a whole number, or -1 for all.", count=settings.nprocs),
        ),
    ]
    problems = [problem for is_wrong, problem in checks if is_wrong]
    # Bounds are compared as numbers, so what is no number comes first.
    return problems or [*_out_of_bounds(settings)]


def _out_of_bounds(settings: Settings) -> Iterator[Problem]:
    for each in (*settings_of(LaunchSettings), *settings_of(SweepSettings)):
        # The word for null stays a name here: the door's own is filled in with the others.
        if each.bound is not None and (demand := each.bound.demand(getattr(settings, each.name), null="{null}")):
            yield Problem(f"{{{each.name}}}={{value}} {demand}", value=getattr(settings, each.name))


def _is_not_whole(value: object) -> bool:
    # Python counts True as a whole number, and nprocs=true means none.
    return isinstance(value, bool) or not isinstance(value, int)


def _placed(settings: Settings, environ: Mapping[str, str]) -> Placement:
    needed = _BACKEND_OF.get(settings.device_type or "")
    # Before a probe, which costs an import of torch: these two contradict each other on every machine.
    if needed is not None and settings.backend in {*_BACKEND_OF.values()} - {needed}:
        sentence = "{devices}={ids} goes with {backend}={needed}, not with {backend}={name}."
        raise ConfigError(Problem(sentence, ids=settings.devices, needed=needed, name=settings.backend))
    placement = place(settings.backend, settings.nprocs, settings.devices, usable_cores(), environ, registry.machine)
    kind = settings.device_type
    # backend=auto may have found another accelerator than the one that the list is of.
    if kind is not None and placement.devices and placement.device != kind:
        sentence = "{devices}={ids} names devices of type {kind}, but {backend}={name} is for {device}."
        raise ConfigError(Problem(sentence, ids=settings.devices, kind=kind, name=placement.backend, device=placement.device))
    if traits_of(settings.method).needs_one_rank and placement.nprocs != 1:
        means = f" means {placement.nprocs} here" if settings.nprocs == -1 else ""
        sentence = (
            "{method}=inline runs one rank in this process, but {nprocs}={count}{means}. Use {nprocs}=1, or {method}=spawn."
        )
        raise ConfigError(Problem(sentence, count=settings.nprocs, means=means))
    return placement


def _problems_of_training(settings: Settings, nprocs: int) -> list[Problem | str]:
    train, pairs = settings.train, settings.pairs
    if train is None:
        return []
    problems: list[Problem | str] = [*train.problems(nprocs)]
    if pairs > 0 and train.steps is not None and 1 <= train.steps <= train.warmup_steps:
        sentence = (
            "{pairs}={count} compares measured steps, and steps={steps} leaves none after warmup_steps={warmup}: "
            "use steps={more} or more."
        )
        values = {"steps": train.steps, "warmup": train.warmup_steps, "more": train.warmup_steps + 1}
        problems.append(Problem(sentence, count=pairs, **values))
    return problems

"""From composed jobs to plans: all jobs of a sweep are checked before the first one starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.types import TaskFunction

from harness.entrypoints.hydra_compose import Composed, settings_of
from harness.entrypoints.settings import Settings, plan_of
from harness.errors import ConfigError, HarnessError
from harness.rank.function_reference import describe_function
from harness.rank.main_script import describe_main
from harness.run.checkpoint_file import find_checkpoint, find_weights
from harness.run.folder import RunDir
from harness.run.job import Job
from harness.run.launch_methods import traits_of
from harness.run.plan import Task, TrainPlan


def plan_all(batch: Sequence[Composed], function: TaskFunction) -> list[Job]:
    """Return all jobs of a sweep, ready to start.

    Raises:
        ConfigError: Any of them has a setting that cannot work; all such settings of all jobs are named.
    """
    # A function that has no name can run in this very process alone: where any job starts another, it must be found by name.
    methods = {settings_of(composed.config)["method"] for composed in batch}
    task = describe_function(function, inline=all(traits_of(method).needs_one_rank for method in methods))
    jobs, problems = [], []
    for composed in batch:
        try:
            jobs.append(plan_one(composed, task))
        except HarnessError as error:
            problems.append(f"job {composed.number}: {error}" if len(batch) > 1 else str(error))
    problems += shared_folders(batch)
    if problems:
        raise ConfigError("\n".join(problems))
    return jobs


def _nothing_to_start_from(composed: Composed, train: TrainPlan) -> list[str]:
    """Return what is wrong with the files to start from, unless a job before this one may leave them."""
    sentences = []
    for name, find in ((train.resume, find_checkpoint), (train.weights, find_weights)):
        path = Path(os.getcwd(), name or "")
        if name is None or path.is_relative_to(os.path.abspath(composed.config.hydra.sweep.dir)):
            continue
        try:
            find(path)
        except ConfigError as error:
            sentences.append(str(error))
    return sentences


def shared_folders(batch: Sequence[Composed]) -> list[str]:
    """Return a sentence for each job that would write over an earlier one's folder."""
    owners: dict[Path, int] = {}
    sentences = []
    for composed in batch:
        # The first to come owns the folder.
        owner = owners.setdefault(composed.folder, composed.number)
        if owner != composed.number:
            sentence = f"job {composed.number} would write over job {owner}, into {composed.folder}"
            sentences.append(f"{sentence}: put ${{hydra.job.num}} into hydra.sweep.subdir.")
    return sentences


def plan_one(composed: Composed, task: Task) -> Job:
    """Return one job's plan and folder."""
    asked = settings_of(composed.config)
    devices = asked["devices"]
    # Hydra takes [4,5] for a list, '4,5' in quotes for a text, and 4,5 for a sweep.
    listed = ",".join(map(str, devices)) if isinstance(devices, list) else devices
    train = TrainPlan.from_config(asked["train"]) if asked["train"] else None
    settings = Settings(
        task=Task("train", *describe_main(), module="harness.train", name="train") if train else task,
        door="hydra",
        job=composed.number,
        devices=None if listed is None else str(listed),
        sys_path=sys.path,
        # Hydra sets these in the process that runs a job: here that is every rank.
        variables={str(name): str(value) for name, value in composed.config.hydra.job.env_set.items()},
        train=train,
        problems=[*_two_lengths(composed), *_nothing_to_start_from(composed, train)] if train else [],
        **{name: asked[name] for name in _SAME},
    )
    label = {str(name): str(value) for name, value in (asked["choices"] or {}).items()}
    return Job(plan_of(settings), RunDir(composed.folder), list(composed.overrides), label)


_SAME = ("method", "start_method", "nprocs", "backend", "threads", "timeout_s", "grace_s", "pairs")
"""Settings that the plugin and a plan call alike."""


def _two_lengths(composed: Composed) -> list[str]:
    """Return a sentence where both ways to say how long to train were typed; of defaults, the one that is null gives way."""
    # From what was typed: steps has a default, so a composed value does not tell what was meant.
    typed = dict(override.partition("=")[::2] for override in composed.config.hydra.overrides.task)
    given = [f"{name}={typed[name]}" for name in ("steps", "epochs") if typed.get(name, "null") != "null"]
    return [f"{' and '.join(given)} exclude each other: give one of them."] if len(given) == 2 else []

"""Checkpoints: written whole by rank 0, read by any number of ranks, or by bare torch."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.compare.plans import OBSERVING
from harness.errors import ConfigError, HarnessError
from harness.run.checkpoint_file import find_checkpoint, unreadable
from harness.run.plan import TrainPlan
from harness.training.seeds import seed_rank
from harness.training.state import random_states, set_random_states
from harness.training.trainer import Trainer

NOT_TOLD = OBSERVING | {"resume", "stop_after", "checkpoint_every", "eval_every"}
"""Settings of which nobody asks whether they were others before a checkpoint than they are after it."""


def save(trainer: Trainer, path: Path, step: int) -> None:
    """Write what training needs to go on after ``step`` steps, and return on all ranks when it is written.

    Whenever this process ends, the path holds the old checkpoint or the new one.

    Raises:
        ConfigError: The optimizer or the scheduler holds what is not data, so that the checkpoint could not be read again.
        HarnessError: It cannot be written; the old one stands.
    """
    seat = trainer.seat
    # Rank 0 writes alone, but each rank is to go on with the random streams that are its own.
    states: list[Any] = [_plain(random_states())] * seat.world_size
    if seat.world_size > 1:
        dist.all_gather_object(states, states[0])
    if seat.rank == 0:
        # Now, and not when somebody resumes: what cannot be read then is lost.
        _require_data(trainer)
        try:
            _write_whole(_content(trainer, step, states), path)
        except OSError as error:
            before = f" The one before it is whole: {path}." if path.exists() else ""
            raise HarnessError(f"The checkpoint after step {step} cannot be written: {error.strerror}.{before}") from error
    if seat.world_size > 1:
        # The next step's time is not to hold rank 0's writing.
        dist.barrier()


def _require_data(trainer: Trainer) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would refuse; tensors are left out, as they are data anyway.

    Raises:
        ConfigError: An object of another type lies in the optimizer's settings or in the scheduler's state.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in trainer.optimizer.param_groups]
    for what, state in (("optimizer", groups), ("scheduler", trainer.scheduler.state_dict() if trainer.scheduler else None)):
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            # torch has no exception of its own for it: only its text names the class that it refuses.
            name = re.search(r"GLOBAL (\S+)", str(error))
            holds = name[1] if name else (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"checkpoint_every={trainer.plan.checkpoint_every}: the {what}'s state holds what is no data ({holds}), and no "
                f"checkpoint with it could be read again. Give the {what} a state_dict() of numbers, texts and tensors."
            ) from None


def _content(trainer: Trainer, step: int, states: list[Any]) -> dict[str, Any]:
    return {
        "step": step,
        "num_steps": trainer.num_steps,
        "model": trainer.strategy.full_state(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict() if trainer.scheduler else None,
        "random": states,
        # By way of JSON, which leaves no class that torch would refuse to load.
        "settings": json.loads(json.dumps(dataclasses.asdict(trainer.plan), default=str)),
    }


def _write_whole(content: dict[str, Any], path: Path) -> None:
    # In the same folder, because only within one file system is a rename atomic.
    aside = path.with_name(f".{path.name}.aside")
    try:
        with aside.open("wb") as file:
            torch.save(content, file)
            file.flush()
            # A rename may reach the disk before the bytes do: after a power cut the name would stand for an empty file.
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        # An interrupt too is not to leave a file of a checkpoint's size behind.
        aside.unlink(missing_ok=True)
        raise


def look(path: Path, plan: TrainPlan, nprocs: int) -> str:
    """Return after which step a training goes on, and what is set otherwise than it was before; no tensor is read.

    Raises:
        ConfigError: There is no such checkpoint, it cannot be read, or it has no step left to take.
    """
    # Mapped into memory, so that of a file of gigabytes only a few pages are read.
    content = _read(path, torch.device("cpu"), mapped=True)
    step = int(content["step"])
    if plan.steps is not None:
        _require_steps(path, step, plan.steps)
    before = {"nprocs": len(content["random"]), **content.get("settings", {})}
    # As the checkpoint's went through JSON: a tuple would differ from the list that it has become.
    now = json.loads(json.dumps({"nprocs": nprocs, **dataclasses.asdict(plan)}, default=str))
    of = "" if plan.steps is None else f" of {plan.steps}"
    changed = ", ".join(_changed(before, now))
    return f"The training of {path} goes on after step {step}{of}{f'. Set otherwise than there: {changed}' if changed else ''}."


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield ``seed is 1 and was 0`` for each setting that is known of both and differs, by its dotted name."""
    for name, was in before.items():
        # A checkpoint of another version may have settings that are no more.
        if name not in now or (not prefix and name in NOT_TOLD):
            continue
        if isinstance(was, Mapping) and isinstance(now[name], Mapping):
            yield from _changed(was, now[name], f"{prefix}{name}.")
        elif was != now[name]:
            yield f"{prefix}{name} is {_typed(now[name])} and was {_typed(was)}"


def _typed(value: Any) -> str:
    """Return a setting as one types it."""
    return value if isinstance(value, str) else json.dumps(value)


def _require_steps(path: Path, step: int, num_steps: int) -> None:
    if step >= num_steps:
        raise ConfigError(
            f"resume={path}: the checkpoint has {step} steps behind it, and this run has {num_steps} in all. "
            f"None is left: use steps={step + 1} or more."
        )


def load(trainer: Trainer, path: Path) -> int:
    """Take over a checkpoint, by its path or its run's folder, and return the number of steps that it has behind it.

    Random streams go on where they were if the number of ranks is the same; otherwise they begin anew. A training that is
    now longer or shorter than it was goes on by the schedule of its new length, as it is from that step on.

    Raises:
        ConfigError: There is no such checkpoint, it is of another model, or it has no step left to take.
    """
    content = _read(path, trainer.seat.device)
    step, seat = int(content["step"]), trainer.seat
    is_other_length = trainer.scheduler is not None and content.get("num_steps", trainer.num_steps) != trainer.num_steps
    # Before anything is taken over: it is the trainer's own scheduler, still at its beginning, that goes through the steps.
    schedule = _schedule_at(trainer, step) if is_other_length else None
    _take_over(trainer, content, path)
    if schedule is not None:
        _reschedule(trainer, *schedule)
    _require_steps(path, step, trainer.num_steps)
    if len(content["random"]) == seat.world_size:
        set_random_states(_restored(content["random"][seat.rank]))
    else:
        # By the step too: otherwise the ranks would draw again what they drew from the first step on.
        seed_rank(trainer.plan.seed, seat.rank, step)
    return step


_KINDS: Mapping[str, Any] = {
    "step": int,
    "model": dict,
    "optimizer": dict,
    "scheduler": dict | None,
    "random": list,
}
"""What a checkpoint holds, at the least, and of which type."""


def _read(path: Path, device: torch.device, mapped: bool = False) -> dict[str, Any]:
    """Return a checkpoint's content, which is data alone: whatever it may name, nothing of it is run."""
    file = find_checkpoint(path)
    try:
        content = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        program = re.search(r"GLOBAL (\S+)", str(error))
        if program is None:
            raise unreadable(file) from None
        raise ConfigError(f"resume={file} is no checkpoint: it holds {program[1]}, which is a program, and no data.") from None
    except Exception:  # whatever damaged bytes come to
        raise unreadable(file) from None
    # Weights in another form, say: it lacks all keys, and is refused by their names.
    if not isinstance(content, dict):
        content = {}
    missing = sorted(_KINDS.keys() - content.keys())
    if missing:
        raise ConfigError(f"resume={file} is no checkpoint of a run: it has no {', '.join(missing)}.")
    # A bool is an int to isinstance.
    wrong = [name for name, kind in _KINDS.items() if not isinstance(content[name], kind) or isinstance(content[name], bool)]
    if wrong or content["step"] < 0 or not isinstance(content.get("settings", {}), dict):
        name = (wrong or ["step" if content["step"] < 0 else "settings"])[0]
        shown = textwrap.shorten(repr(content[name]), 60, placeholder="...")
        raise ConfigError(f"resume={file} is no checkpoint of a run: its {name} is {shown}.")
    return dict(content)


def _take_over(trainer: Trainer, content: dict[str, Any], path: Path) -> None:
    try:
        trainer.model.load_state_dict(content["model"])
    except RuntimeError as error:
        # torch's text begins with the model's class, and may go on for hundreds of keys.
        difference = textwrap.shorten(str(error).partition(":")[2], 300, placeholder=" ...")
        raise ConfigError(f"resume={path}: the checkpoint is of another model. {difference}") from None
    try:
        trainer.optimizer.load_state_dict(content["optimizer"])
    except (ValueError, KeyError) as error:
        raise ConfigError(f"resume={path}: the checkpoint is of another optimizer. {error}") from None
    if (trainer.scheduler is None) != (content["scheduler"] is None):
        has, lacks = ("the recipe", "the checkpoint") if trainer.scheduler else ("the checkpoint", "the recipe")
        raise ConfigError(f"resume={path}: {has} has a scheduler, and {lacks} has none.")
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(content["scheduler"])


def _reschedule(trainer: Trainer, settings: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any]) -> None:
    """Put the trainer where a schedule is: into the optimizer's settings, lr among them, and into the scheduler."""
    assert trainer.scheduler is not None
    for group, scheduled in zip(trainer.optimizer.param_groups, settings, strict=True):
        # A state names parameters by their numbers; the optimizer holds the parameters themselves.
        group.update({name: value for name, value in scheduled.items() if name != "params"})
    trainer.scheduler.load_state_dict(dict(schedule))


def _schedule_at(trainer: Trainer, step: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the optimizer's settings and the scheduler's state that a new trainer comes to in so many steps."""
    assert trainer.scheduler is not None
    with warnings.catch_warnings():
        # Of a scheduler that is stepped before the optimizer; this one catches up with an optimizer that has been.
        warnings.simplefilter("ignore")
        for _ in range(step):
            trainer.scheduler.step()
    return trainer.optimizer.state_dict()["param_groups"], trainer.scheduler.state_dict()


def _plain(states: dict[str, Any]) -> dict[str, Any]:
    """Return random states without arrays of numpy, which torch refuses to load by default."""
    kind, keys, *rest = states["numpy"]
    return {**states, "numpy": [kind, keys.tolist(), *rest]}


def _restored(states: dict[str, Any]) -> dict[str, Any]:
    return {**states, "numpy": tuple(states["numpy"])}

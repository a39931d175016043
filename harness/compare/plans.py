"""What two plans differ in, and whether their runs may be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from harness.errors import NotComparable
from harness.run.plan import RunPlan

HOW_STARTED = frozenset({
    "door", "job", "method", "start_method", "backend_reason", "timeout_s", "grace_s", "cwd", "sys_path", "argv", "master_port",
    "max_restarts", "trial",
})  # fmt: skip
"""Fields of a RunPlan that say how and where ranks start, never what they train."""

OBSERVING = frozenset({"compare", "on_mismatch", "reference", "log_every", "profile", "warmup_steps"})
"""Fields of a TrainPlan that say how a training is watched."""

NOT_SET = "not set"


def differences(plan_a: RunPlan, plan_b: RunPlan) -> dict[str, tuple[Any, Any]]:
    """Return setting -> both values, for all that two runs differ in besides how they were started and watched.

    Settings are named as they are typed: ``global_batch_size``, ``recipe.lr``.
    """
    a, b = _settings(plan_a), _settings(plan_b)
    pairs = {name: (a.get(name, NOT_SET), b.get(name, NOT_SET)) for name in dict.fromkeys((*a, *b))}
    # By repr as well: NaN is unequal to itself, and two plans that both say NaN do not differ.
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and repr(pair[0]) != repr(pair[1])}


def _settings(plan: RunPlan) -> dict[str, Any]:
    own = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name not in HOW_STARTED}
    train = own.pop("train")
    settings = dict(_flat("", dataclasses.asdict(train) if train else {}))
    # The line tells two functions of one name apart; that the file was edited elsewhere is no difference.
    # Of a training the plan says all: whoever's script asked for it is no difference either.
    task = {key: value for key, value in dataclasses.asdict(plan.task).items() if key != "line"}
    own["task"] = None if plan.task.kind == "train" else task
    return {**dict(_flat("", own)), **{name: value for name, value in settings.items() if name not in OBSERVING}}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        # A plan that was read from JSON has lists where a new one has tuples.
        yield prefix, list(value) if isinstance(value, tuple) else value
        return
    for key, inner in value.items():
        yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)


def require_same_training(plan: RunPlan, other: RunPlan) -> None:
    """Refuse to compare runs that differ in more than how they were started.

    Raises:
        NotComparable: They do; it names every setting with both values.
    """
    differing = differences(plan, other)
    if differing:
        named = ", ".join(f"{name} is {value} against {value_there}" for name, (value, value_there) in differing.items())
        raise NotComparable(f"job {plan.job} cannot be compared with job {other.job}: {named}.")


def may_share_reference(plan_a: RunPlan, plan_b: RunPlan) -> bool:
    """Return True where one verification can stand for both: the same training, verified to the same depth.

    It can then be left out of the second run, if the two are compared in bits (R10) and with what was verified (R13).
    """
    if plan_a.train is None or plan_b.train is None:
        return False
    return plan_a.train.compare == plan_b.train.compare != "off" and not differences(plan_a, plan_b)

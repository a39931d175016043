"""harness.compare.correctness and its checks, on made-up evidence: green for a correct run, red for each fault."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.compare import detection, plans
from harness.compare.correctness import bounds, check, checks_runs
from harness.compare.correctness.check import Check
from harness.compare.correctness.verdict import Verdict, judge
from harness.compare.detection import AuditRow, Trial, audit_table
from harness.errors import NotComparable
from harness.run.plan import RunPlan, Task, TrainPlan
from harness.run.record import RankResult, RunResult, joined

PARAMETERS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
BUFFERS = ("bn.running_mean", "bn.num_batches_tracked")
QUICK = ("R0", "R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9", "R11", "R14")
NUM_STEPS = 3

Mutation = Callable[[Any], None]


# --- evidence of a correct run -----------------------------------------------------------------------------------------


def digests(names: tuple[str, ...], *what: object) -> dict[str, str]:
    return {name: joined({name: repr(what)}) for name in names}


def state(done: int) -> dict[str, str]:
    momentum = tuple(f"optimizer.{number}.momentum_buffer" for number in range(len(PARAMETERS))) if done else ()
    return {**digests(PARAMETERS, "parameters", done), **digests(momentum, "optimizer", done)}


def buffers(done: int, rank: int) -> dict[str, str]:
    return digests(BUFFERS, "buffers", done, rank if done else 0)


def step_evidence(number: int, n: int) -> dict[str, Any]:
    losses = [[2.0 / (1 + number) + 0.1 * rank] for rank in range(n)]
    local = [digests(PARAMETERS, "local", number, rank) for rank in range(n)]
    sums = [[loss[0] * 4, 4.0] for loss in losses]
    return {
        "step": number,
        "lr": [[0.1 / (1 + number)] for _ in range(n)],
        "declared_lr": [0.1 / (1 + number)],
        "rng": [f"rng {number} {rank}" for rank in range(n)],
        "batches": [f"batch {number} {rank}" for rank in range(n)],
        "replayed_batches": [f"batch {number} {rank}" for rank in range(n)],
        "before": [{**state(number), **buffers(number, rank)} for rank in range(n)],
        "losses": losses,
        "replayed_losses": copy.deepcopy(losses),
        "local": local,
        "replayed_local": copy.deepcopy(local),
        "local_excess": None,
        "not_replayed": "",
        "reduced": [digests(PARAMETERS, "reduced", number) for _ in range(n)],
        "reduction_ratio": dict.fromkeys(PARAMETERS, 0.0 if n <= 2 else 0.25),
        "after": [state(number + 1) for _ in range(n)],
        "replayed_after": state(number + 1),
        "buffers": [buffers(number + 1, rank) for rank in range(n)],
        "replayed_buffers": [buffers(number + 1, rank) for rank in range(n)],
        "movement": {name: [True, True, True, True, True] for name in PARAMETERS},
        "loss": {
            "ranks": sums,
            "reference": copy.deepcopy(sums),
            "reported": sum(total for total, _ in sums) / sum(count for _, count in sums),
        },
    }


def green(n: int = 2, tier: str = "full") -> Any:
    """Return the evidence of a correct run of ``n`` ranks, whose model has BatchNorm and dropout."""
    facts = {"backend": "gloo", "device": "cpu", "dtype": "torch.float32", "threads": 1, "torch": "2.13", "deterministic": True}
    metrics = {"correct": [31.0, 40.0], "loss": [12.25, 40.0]}
    ratios = dict.fromkeys(PARAMETERS, 1e-4)
    excess = dict.fromkeys(PARAMETERS, 1.1)
    return {
        "format": 1,
        "tier": tier,
        "nprocs": n,
        "precision": "float32",
        "deterministic": True,
        "sync_bn": False,
        "has_batch_norm": True,
        "uses_random": True,
        "find_unused_parameters": False,
        "asked_world_size": n,
        "facts": [{"world_size": n, "group_rank": rank, **facts, "uncovered": []} for rank in range(n)],
        "uncovered": [],
        "partition": {
            "num_samples": 57,
            "epochs": 2,
            "missing": 0,
            "repeated": 0,
            "overlaps": 0,
            "same_order": False,
            "orders_differ": False,
            "first": None,
        },
        "birth": [{**state(0), **buffers(0, 0)} for _ in range(n)],
        "reference_birth": {**state(0), **buffers(0, 0)},
        "steps": [step_evidence(number, n) for number in range(NUM_STEPS)],
        "float64": None if tier == "quick" else [{"step": s, "ratios": dict(ratios), "loss_error": 2.0} for s in (0, 1)],
        "own_precision": [{"step": s, "ratios": dict(excess), "loss_error": 2.0} for s in (0, 1)],
        "not_mathematics": "",
        "evaluation": metrics,
        "reference_evaluation": copy.deepcopy(metrics),
        "observed_twice": None if tier == "quick" else [[state(s + 1), state(s + 1)] for s in range(NUM_STEPS)],
    }


def judged(mutate: Mutation, n: int = 2, tier: str = "full") -> Verdict:
    evidence = green(n, tier)
    mutate(evidence)
    return judge(evidence)


def red(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.checks if check.status == "failed"]


def unchecked(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.detail for check in verdict.checks if check.status == "not checked"}


def of(verdict: Verdict, name: str) -> Check:
    return next(check for check in verdict.checks if check.name == name)


def setting(*path: Any) -> Mutation:
    """Return a mutation that puts the last of ``path`` where the others lead."""
    *way, key, value = path

    def mutate(evidence: Any) -> None:
        for part in way:
            evidence = evidence[part]
        evidence[key] = value

    return mutate


def all_of(*mutations: Mutation) -> Mutation:
    def mutate(evidence: Any) -> None:
        for each in mutations:
            each(evidence)

    return mutate


def with_sync_bn(evidence: Any) -> None:
    evidence["sync_bn"] = True
    for step in evidence["steps"]:
        step.update(replayed_losses=None, replayed_local=None, replayed_buffers=None, replayed_batches=None)
        step["not_replayed"] = "synchronised BatchNorm makes a shard's gradient depend on the other shards"
        step["buffers"] = [buffers(step["step"] + 1, 0) for _ in range(evidence["nprocs"])]
        step["before"] = [{**state(step["step"]), **buffers(step["step"], 0)} for _ in range(evidence["nprocs"])]


def without_buffers(evidence: Any) -> None:
    evidence["has_batch_norm"] = False
    for step in evidence["steps"]:
        for key in ("buffers", "replayed_buffers"):
            step[key] = [{} for _ in range(evidence["nprocs"])]
        step["before"] = [state(step["step"]) for _ in range(evidence["nprocs"])]
    evidence["birth"] = [state(0) for _ in range(evidence["nprocs"])]
    evidence["reference_birth"] = state(0)


def not_deterministic(evidence: Any) -> None:
    evidence["deterministic"] = False
    for each in evidence["facts"]:
        each["deterministic"] = False


# --- green -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_correct_run_is_green(n):
    verdict = judge(green(n))
    assert [check.name for check in verdict.checks] == [*QUICK[:-1], "R13", "R14"]
    assert {check.status for check in verdict.checks} == {"passed"}
    assert verdict.failed is None and verdict.is_proof
    assert verdict.label == "equal to 1 process: 13 of 13 checks"
    assert verdict.sentences() == []
    assert all(check.detail and check.title for check in verdict.checks)


def test_the_quick_tier_leaves_out_r7_and_r13():
    verdict = judge(green(tier="quick"))
    assert tuple(check.name for check in verdict.checks) == QUICK
    assert unchecked(verdict) == {"R7": "compare=quick leaves it out, compare=full runs it"}
    assert verdict.label == "equal to 1 process: 11 of 11 checks"
    seen_twice = judged(setting("observed_twice", [[state(s + 1)] * 2 for s in range(NUM_STEPS)]), tier="quick")
    assert of(seen_twice, "R13").status == "passed"


def test_evidence_survives_its_file():
    evidence = green(3)
    evidence["steps"][0]["reduction_ratio"]["fc1.bias"] = math.inf
    assert judge(json.loads(json.dumps(evidence))) == judge(evidence)


def test_one_rank_is_not_compared_with_itself_but_replayed():
    verdict = judge(green(1))
    assert set(unchecked(verdict)) == {"R4", "R6", "R7", "R8"}
    assert all("one rank compared with itself says nothing" in reason for reason in unchecked(verdict).values())
    assert red(verdict) == []
    assert verdict.label == "equal to 1 process: 9 of 9 checks"
    assert red(judged(setting("steps", 1, "local", 0, "fc1.bias", "other"), n=1)) == ["R3"]


def test_one_rank_without_buffers_says_nothing_of_streams():
    assert "one rank has one random stream" in unchecked(judged(without_buffers, n=1))["R11"]


def test_thresholds_come_with_their_origin():
    origins = {check.name: (check.threshold, check.origin) for check in judge(green(3)).checks}
    assert origins["R4"] == (1, "theorem")
    assert origins["R7"] == (1, "declared")
    assert origins["R8"] == (4, "measured")
    assert origins["R9"] == (1e-12, "declared")
    assert {origins[name] for name in ("R2", "R3", "R5", "R6", "R11", "R13")} == {(None, "bits")}


def test_quantities_are_the_worst_seen():
    evidence = green(3)
    evidence["steps"][1]["reduction_ratio"]["fc1.bias"] = 0.75
    evidence["own_precision"][1]["ratios"]["fc2.bias"] = 3.5
    evidence["float64"][0]["ratios"]["fc2.bias"] = 0.5
    verdict = judge(evidence)
    assert red(verdict) == []
    assert [of(verdict, name).quantity for name in ("R4", "R7", "R8", "R9")] == [0.75, 0.5, 3.5, 0.0]


# --- the faults ------------------------------------------------------------------------------------------------------


def not_reduced(tensor: str, step: int = 0, rank: int = 1) -> Mutation:
    return all_of(
        setting("steps", step, "reduced", rank, tensor, "local of its own"),
        setting("steps", step, "reduction_ratio", tensor, 3.1e5),
    )


def badly_reduced(ratio: float, step: int = 0, tensors: tuple[str, ...] = PARAMETERS) -> Mutation:
    """On all ranks alike."""
    return all_of(*(setting("steps", step, "reduction_ratio", name, ratio) for name in tensors))


def every_step(*path: Any) -> Mutation:
    return all_of(*(setting("steps", number, *path) for number in range(NUM_STEPS)))


def mathematics(ratio: float, tensor: str = "fc1.weight") -> Mutation:
    return setting("float64", 0, "ratios", tensor, ratio)


def lost(count: str, **first: int) -> Mutation:
    return all_of(setting("partition", count, 1), setting("partition", "first", first))


# number in the table of faults -> name, mutation, red checks, where the first one is
FAULTS: dict[int, tuple[str, Mutation, list[str], dict[str, Any]]] = {
    1: ("last bias not reduced", not_reduced("fc2.bias"), ["R4", "R6"], {"step": 0, "rank": 1, "tensor": "fc2.bias"}),
    2: (
        "rank 0's value on all ranks",
        badly_reduced(2e6, tensors=("fc1.bias",)),
        ["R4"],
        {"step": 0, "rank": 0, "tensor": "fc1.bias"},
    ),
    3: ("sum", all_of(badly_reduced(8e6), mathematics(1e11)), ["R4", "R7"], {"step": 0, "tensor": "fc2.bias"}),
    4: ("divided twice", all_of(badly_reduced(4e6), mathematics(5e10)), ["R4", "R7"], {"step": 0, "tensor": "fc2.bias"}),
    5: ("unequal shards averaged equally", mathematics(3e8), ["R7"], {"step": 0, "tensor": "fc1.weight"}),
    6: ("not sharded", lost("repeated", epoch=0, step=0, rank=1, id=7), ["R1"], {"step": 0, "rank": 1, "id": 7}),
    7: (
        "one twice, one missing",
        all_of(lost("missing", epoch=0, step=3, rank=0, id=9), setting("partition", "repeated", 1)),
        ["R1"],
        {"step": 3, "rank": 0},
    ),
    8: ("last batch dropped", lost("missing", epoch=0, id=56), ["R1"], {"stage": "ids", "id": 56}),
    9: (
        "a sample of another batch",
        setting("steps", 1, "batches", 1, "other"),
        ["R1"],
        {"step": 1, "rank": 1, "stage": "batch"},
    ),
    10: ("epoch not set", setting("partition", "same_order", True), ["R1"], {"stage": "ids"}),
    11: (
        "not synchronised at birth",
        all_of(
            *(setting("birth", 1, name, "own") for name in PARAMETERS),
            *(setting("steps", 0, when, 1, name, "own") for name in PARAMETERS for when in ("before", "after")),
        ),
        ["R2", "R5", "R6"],
        {"step": 0, "rank": 1, "stage": "birth", "tensor": "fc1.weight"},
    ),
    12: (
        "1 ulp at birth",
        all_of(
            *(setting(*path, 1, "fc2.weight", "ulp") for path in (("birth",), ("steps", 0, "before"))),
            setting("steps", 0, "after", 1, "fc2.weight", "ulp"),
        ),
        ["R2", "R5", "R6"],
        {"step": 0, "rank": 1, "tensor": "fc2.weight"},
    ),
    13: (
        "stale buffers",
        setting("steps", 1, "buffers", 1, "bn.running_mean", "stale"),
        ["R11"],
        {"step": 1, "rank": 1, "stage": "buffers", "tensor": "bn.running_mean"},
    ),
    14: (
        "no_sync left on for a step",
        all_of(*(not_reduced(name, 1) for name in PARAMETERS)),
        ["R4", "R6"],
        {"step": 1, "rank": 1, "tensor": "fc2.bias"},
    ),
    15: (
        "each process alone",
        all_of(setting("asked_world_size", 2)),
        ["R0"],
        {"rank": 0, "stage": "contract"},
    ),
    16: (
        "accumulation without 1/k",
        all_of(*(setting("steps", 0, "local", rank, name, f"twice {rank}") for rank in (0, 1) for name in PARAMETERS)),
        ["R3"],
        {"step": 0, "rank": 0, "stage": "local gradient", "tensor": "fc2.bias"},
    ),
    17: (
        "zero_grad forgotten",
        all_of(*(setting("steps", 1, "local", rank, "fc1.bias", f"sum {rank}") for rank in (0, 1))),
        ["R3"],
        {"step": 1, "rank": 0, "tensor": "fc1.bias"},
    ),
    18: ("one bucket stale", badly_reduced(1e5, 1, PARAMETERS[:2]), ["R4"], {"step": 1, "tensor": "fc1.bias"}),
    19: (
        "lr times N",
        every_step("after", 0, "fc1.weight", "far"),
        ["R5", "R6"],
        {"step": 0, "rank": 0, "stage": "state after"},
    ),
    20: (
        "scheduler stepped N times",
        setting("steps", 1, "lr", [[0.025], [0.025]]),
        ["R5"],
        {"step": 1, "rank": 0, "stage": "lr"},
    ),
    21: (
        "lr off by 2e-7 on one rank",
        setting("steps", 0, "lr", 1, [0.1 * (1 + 2e-7)]),
        ["R5", "R6"],
        {"step": 0, "rank": 1, "stage": "lr"},
    ),
    22: (
        "weight decay on one rank",
        setting("steps", 0, "after", 1, "fc1.weight", "decayed"),
        ["R5", "R6"],
        {"step": 0, "rank": 1, "stage": "state after", "tensor": "fc1.weight"},
    ),
    23: (
        "a parameter missing in the optimizer",
        all_of(
            *(setting("steps", 0, "after", rank, "fc2.weight", state(0)["fc2.weight"]) for rank in (0, 1)),
            setting("steps", 0, "movement", "fc2.weight", [True, True, True, False, True]),
        ),
        ["R5", "R14"],
        {"step": 0, "rank": 0, "stage": "state after", "tensor": "fc2.weight"},
    ),
    24: (
        "clipped before the reduction",
        setting("steps", 2, "local", 1, "fc2.bias", "clipped"),
        ["R3"],
        {"step": 2, "rank": 1},
    ),
    25: (
        "bf16 compression",
        all_of(badly_reduced(1.3e5), mathematics(2e8), setting("own_precision", 0, "ratios", "fc2.bias", 3e4)),
        ["R4", "R7", "R8"],
        {"step": 0},
    ),
    26: ("fp16 compression", all_of(badly_reduced(2e4), mathematics(3e7)), ["R4", "R7"], {"step": 0}),
    27: (
        "momentum lost",
        all_of(*(setting("steps", 1, "before", rank, "optimizer.0.momentum_buffer", "zero") for rank in (0, 1))),
        ["R5"],
        {"step": 1, "rank": 0, "stage": "state before", "tensor": "optimizer.0.momentum_buffer"},
    ),
    28: (
        "one rank skips a step",
        setting("steps", 2, "after", 1, state(2)),
        ["R5", "R6"],
        {"step": 2, "rank": 1, "stage": "state after"},
    ),
    29: (
        "rank 0's loss is reported",
        setting("steps", 0, "loss", "reported", 2.0),
        ["R9"],
        {"step": 0, "stage": "reported loss"},
    ),
    30: ("sparse rows lost", badly_reduced(math.inf, tensors=("fc1.weight",)), ["R4"], {"step": 0, "tensor": "fc1.weight"}),
    31: ("a gradient times 1 + 2e-7", badly_reduced(3.4, tensors=("fc1.bias",)), ["R4"], {"step": 0, "tensor": "fc1.bias"}),
    32: ("bit flipped in compute", setting("steps", 0, "local", 1, "fc1.bias", "flip"), ["R3"], {"step": 0, "rank": 1}),
    33: (
        "bit flipped on the wire",
        badly_reduced(1.5, 1, ("fc1.bias",)),
        ["R4"],
        {"step": 1, "rank": 0, "tensor": "fc1.bias"},
    ),
    34: (
        "bit flipped after the sum",
        setting("steps", 1, "reduced", 1, "fc1.bias", "flip"),
        ["R4", "R6"],
        {"step": 1, "rank": 1, "stage": "reduced gradient", "tensor": "fc1.bias"},
    ),
    35: ("one dropout stream", every_step("rng", 1, "rng 0 0"), ["R11"], {"step": 0, "rank": 1, "stage": "rng"}),
    36: ("mean of ranks' means", setting("evaluation", "correct", [0.7750001, 1.0]), ["R9"], {"metric": "correct"}),
}


@pytest.mark.parametrize("number", FAULTS)
def test_each_fault_turns_its_checks_red(number):
    _, mutate, checks, where = FAULTS[number]
    verdict = judged(mutate, n=1 if number == 15 else 2)
    assert red(verdict) == checks
    assert verdict.failed is not None and verdict.failed.where is not None
    assert where.items() <= dict(verdict.failed.where).items()
    assert verdict.label == f"FAILED {checks[0]}"
    assert not verdict.is_proof


def test_all_36_faults_are_here():
    assert list(FAULTS) == list(range(1, 37))


# --- nothing passes on what is not there -------------------------------------------------------------------------------

# Leaves that a correct run may have otherwise, or that only say how a red check is told.
HARMLESS = (
    ("format",),
    ("tier",),
    ("precision",),
    ("not_mathematics",),
    ("partition", "num_samples"),
    ("partition", "epochs"),
    ("partition", "first"),
    ("find_unused_parameters",),
    ("has_batch_norm",),
    ("uses_random",),
    ("steps", "not_replayed"),
    ("steps", "replayed_batches"),
    ("steps", "local_excess"),
    ("steps", "rng"),
    ("facts", "device"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in nested evidence."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def worse(value: Any) -> Iterator[Any]:
    """Yield what could stand where ``value`` stands and must not pass for it."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield from (math.nan, None)
        case str():
            yield from ("other", "")
        case dict() | list():
            yield from (type(value)(), None)


def every_change(evidence: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Put every worse value in every place in turn; yield the place and the value while it is there."""
    for path in list(places(evidence)):
        holder = evidence
        for key in path[:-1]:
            holder = holder[key]
        value = holder[path[-1]]
        for bad in (each for each in worse(value) if each != value):
            holder[path[-1]] = bad
            yield path, bad
        holder[path[-1]] = value


def is_harmless(path: tuple[Any, ...], bad: Any) -> bool:
    names = tuple(part for part in path if isinstance(part, str))
    if names[:2] == ("steps", "movement") and isinstance(path[-1], int) and path[-1] in (1, 2, 4):
        # A gradient or a learning rate of zero, and still it moved: by momentum, as the replay did.
        return True
    if names[:2] == ("steps", "rng") or names == ("facts", "device"):
        return bad == "other"
    return names in HARMLESS


def test_whatever_is_empty_lost_or_not_a_number_is_never_green():
    evidence = green(3)
    for series in (evidence["steps"], evidence["observed_twice"]):
        del series[2]
    whole = judge(evidence)
    changes = 0
    for path, bad in every_change(evidence):
        changes += 1
        all_green = {each.status for each in judge(evidence).checks} == {"passed"}
        assert not all_green or is_harmless(path, bad), f"green with {path} = {bad!r}"
    assert changes > 700
    assert judge(evidence) == whole and whole.failed is None


def test_names_that_are_lost_everywhere_are_red():
    """A tensor that is left out of one stage alone must not go unnoticed because all ranks left it out."""
    checks = {
        "local": ["R3", "R4"],
        "replayed_local": ["R3"],
        "reduced": ["R4", "R14"],
        "reduction_ratio": ["R4"],
        "before": ["R5"],
        "after": ["R5", "R13"],
        "replayed_after": ["R5"],
        "movement": ["R14"],
    }
    for key, expected in checks.items():
        evidence = green(2)
        values = evidence["steps"][1][key]
        for each in values if isinstance(values, list) else [values]:
            del each["fc1.bias"]
        if key == "after":
            del evidence["observed_twice"][1][0]["fc1.bias"]
        verdict = judge(evidence)
        assert red(verdict) == expected, key
        assert {(of(verdict, name).where or {}).get("tensor") for name in expected} == {"fc1.bias"}


def test_where_a_name_is_lost():
    verdict = judged(lambda evidence: evidence["steps"][0]["local"][1].pop("fc1.bias"))
    assert of(verdict, "R3").detail == "rank 1 has no such tensor"
    assert (of(verdict, "R4").where or {})["rank"] == 1
    verdict = judged(lambda evidence: evidence["steps"][0]["replayed_local"][1].pop("fc1.bias"))
    assert of(verdict, "R3").detail == "only rank 1 has this tensor, and the replay's part lacks it"
    verdict = judged(lambda evidence: evidence["steps"][0]["after"][2].pop("fc1.bias"), n=3)
    assert of(verdict, "R6").detail == "rank 2 has no such tensor"
    verdict = judged(setting("steps", 0, "local", 1, "fc1.bias", "other"))
    assert of(verdict, "R3").detail == "the bits differ from the replay's"
    verdict = judged(all_of(*(setting("steps", 0, "local", rank, "fc1.bias", "other") for rank in (1, 2))), n=3)
    assert of(verdict, "R3").detail == "the bits differ from the replay's on ranks 1, 2"


@pytest.mark.parametrize("key", ["losses", "local", "reduced", "lr", "before", "after", "buffers", "rng", "batches"])
def test_a_rank_too_few_is_red(key):
    evidence = green(3)
    evidence["steps"][1][key].pop()
    assert red(judge(evidence))


def test_without_a_step_that_counts_nothing_is_proven_and_nobody_accused():
    def leave_out(evidence: Any) -> None:
        evidence.update(steps=[], no_steps="every step was left out", float64=[], own_precision=[], observed_twice=[])

    verdict = judged(leave_out)
    assert red(verdict) == [] and not verdict.is_proof and verdict.label.startswith("not proven")
    assert unchecked(verdict)["R5"] == "every step was left out"
    assert [check.name for check in verdict.checks if check.status == "passed"][:3] == ["R0", "R1", "R2"]
    assert "R1" in red(judged(all_of(leave_out, setting("partition", "missing", 1))))


def test_steps_out_of_order_are_red():
    evidence = green(2)
    evidence["steps"].reverse()
    assert "R6" in red(judge(evidence))


def test_an_empty_evidence_is_red_everywhere_and_raises_nothing():
    verdict = judge({})  # type: ignore[typeddict-item]
    assert {check.status for check in verdict.checks} == {"failed"}
    assert verdict.failed is not None and verdict.failed.where == {"stage": "evidence"}


# --- check by check ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutate", "where", "said"),
    [
        (setting("facts", 1, "world_size", 1), {"rank": 1}, "it sees a world of 1 rank, and 2 were asked for"),
        (setting("facts", 1, "group_rank", 0), {"rank": 1}, "it calls itself rank 0"),
        (setting("facts", 1, "threads", 2), {"rank": 1}, "its threads is 2 against 1"),
        (setting("facts", 1, "deterministic", False), {"rank": 1}, "its deterministic is False, and True was asked for"),
        (setting("facts", 0, "config", "abc"), {"rank": 1}, "its config is 'not recorded' against 'abc'"),
        (setting("facts", 1, "torch", None), {"rank": 1}, "it did not record its torch"),
        (setting("uncovered", ["fc2.bias"]), {"stage": "buckets", "tensor": "fc2.bias"}, "no reduction covers"),
        (
            all_of(setting("facts", 0, "device", "cuda:0"), setting("facts", 1, "device", "cuda:0")),
            {"rank": 1},
            "it shares cuda:0 with rank 0",
        ),
        (lambda evidence: evidence["facts"].pop(), {"stage": "contract"}, "1 rank left facts, and 2 were asked for"),
    ],
)
def test_contract(mutate, where, said):
    verdict = judged(mutate)
    assert red(verdict) == ["R0"]
    assert where.items() <= dict(of(verdict, "R0").where or {}).items()
    assert said in of(verdict, "R0").detail


def test_one_rank_needs_no_backend():
    assert red(judged(setting("facts", 0, "backend", ""), n=1)) == []
    no_backend = all_of(*(setting("facts", rank, "backend", "") for rank in (0, 1)))
    assert red(judged(no_backend)) == ["R0"]


def test_one_device_on_two_machines_is_two_devices():
    def mutate(evidence: Any) -> None:
        for rank, each in enumerate(evidence["facts"]):
            each.update(device="cuda:0", host=f"machine {rank}")

    assert red(judged(mutate)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"missing": 2}, "2 ids of an epoch are taken by no rank"),
        ({"repeated": 1}, "1 ids of an epoch are taken more than once"),
        ({"overlaps": 1}, "1 steps have parts that do not join"),
        ({"orders_differ": True}, "the ranks do not agree on the global batches"),
        ({"same_order": True}, "two epochs have the same order"),
        ({"num_samples": 0}, "no epoch's sample numbers were looked at"),
        ({"epochs": 0}, "no epoch's sample numbers were looked at"),
    ],
)
def test_partition(changes, said):
    verdict = judged(lambda evidence: evidence["partition"].update(changes))
    assert red(verdict) == ["R1"]
    assert said in of(verdict, "R1").detail


def test_a_few_samples_may_come_in_the_same_order_by_chance():
    for num_samples, expected in ((2, []), (9, []), (10, ["R1"])):
        changes = {"same_order": True, "num_samples": num_samples}
        assert red(judged(lambda evidence, c=changes: evidence["partition"].update(c))) == expected


def test_samples_that_cannot_be_read_again_are_not_compared():
    verdict = judged(every_step("replayed_batches", None))
    assert red(verdict) == []
    assert "reference's" not in of(verdict, "R1").detail
    assert "loaded samples are the reference's" in of(judge(green(2)), "R1").detail


def test_birth_is_compared_with_the_reference_even_if_all_ranks_agree():
    mutate = all_of(*(setting(*path, "bn.running_mean", "other") for path in (("birth", 0), ("birth", 1))))
    verdict = judged(mutate)
    assert red(verdict)[0] == "R2"
    assert "on all ranks" in of(verdict, "R2").detail


def test_the_first_gradient_in_the_order_of_backward_is_named():
    mutate = all_of(*(setting("steps", 1, "local", 1, name, "other") for name in ("fc1.weight", "fc2.weight", "fc1.bias")))
    assert of(judged(mutate), "R3").where == {"step": 1, "rank": 1, "stage": "local gradient", "tensor": "fc2.weight"}


def test_the_loss_comes_before_its_gradients():
    mutate = all_of(setting("steps", 1, "local", 0, "fc1.bias", "other"), setting("steps", 1, "losses", 1, [0.25]))
    check = of(judged(mutate), "R3")
    assert check.where == {"step": 1, "rank": 1, "stage": "loss"}
    assert "the loss is 0.25 where the replay has 1.1" in check.detail


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_equal_to_nothing(loss):
    mutate = all_of(setting("steps", 0, "losses", 0, [loss]), setting("steps", 0, "replayed_losses", 0, [loss]))
    assert "R3" in red(judged(mutate))


def test_minus_zero_is_not_zero():
    mutate = all_of(setting("steps", 0, "losses", 0, [0.0]), setting("steps", 0, "replayed_losses", 0, [-0.0]))
    assert red(judged(mutate)) == ["R3"]


def test_a_rank_without_a_sample_has_no_loss():
    mutate = all_of(setting("steps", 0, "losses", 1, []), setting("steps", 0, "replayed_losses", 1, []))
    assert red(judged(mutate)) == []


def test_losses_that_no_rank_has_are_no_losses():
    none: list[list[float]] = [[], []]
    verdict = judged(all_of(setting("steps", 1, "losses", none), setting("steps", 1, "replayed_losses", none)))
    assert red(verdict) == ["R3"]
    assert of(verdict, "R3").detail == "no loss was recorded at step 1"


def test_gradients_that_no_rank_has_are_no_gradients():
    none = dict.fromkeys(PARAMETERS, "none")
    mutate = every_step("local", [none, none]), every_step("replayed_local", [none, none])
    assert red(judged(all_of(*mutate))) == ["R3", "R4"]


def test_what_was_not_replayed_needs_its_reason():
    gone = {"replayed_losses": None, "replayed_local": None}
    verdict = judged(lambda evidence: evidence["steps"][2].update(gone, not_replayed="only steps 0 and 1 are"))
    assert red(verdict) == [] and "at steps 0, 1 are" in of(verdict, "R3").detail
    verdict = judged(lambda evidence: evidence["steps"][2].update(gone))
    assert red(verdict) == ["R3"]
    assert "the evidence does not say why" in of(verdict, "R3").detail


def test_an_optimizer_that_was_not_replayed_is_not_checked():
    mutate = all_of(every_step("replayed_after", None), every_step("not_replayed", "no reference"))
    verdict = judged(mutate)
    assert unchecked(verdict)["R5"] == "no reference"
    assert verdict.label == "not proven: 12 of 12 checks"
    assert red(judged(all_of(mutate, setting("steps", 0, "lr", 1, [1.0])))) == ["R5", "R6"]


def test_synchronised_batchnorm_is_not_replayed_but_compared_over_ranks():
    verdict = judged(with_sync_bn)
    assert red(verdict) == []
    assert set(unchecked(verdict)) == {"R3", "R11"}
    assert "synchronised BatchNorm" in unchecked(verdict)["R3"]
    assert verdict.is_proof
    verdict = judged(all_of(with_sync_bn, setting("steps", 0, "buffers", 1, "bn.running_mean", "own")))
    assert red(verdict)[0] == "R6"
    assert of(verdict, "R6").where == {"step": 0, "rank": 1, "stage": "buffers", "tensor": "bn.running_mean"}


def test_without_gradients_compared_there_is_no_proof():
    mutate = all_of(
        with_sync_bn, setting("float64", None), setting("own_precision", None), setting("not_mathematics", "random data")
    )
    verdict = judged(mutate)
    assert unchecked(verdict)["R7"] == unchecked(verdict)["R8"] == "random data"
    assert not verdict.is_proof
    assert verdict.label == "not proven: 9 of 9 checks"


@pytest.mark.parametrize(("key", "name"), [("float64", "R7"), ("own_precision", "R8")])
def test_mathematics_that_is_missing_without_a_reason_is_red(key, name):
    verdict = judged(setting(key, None))
    assert red(verdict) == [name]


def test_the_module_is_named_in_which_a_loss_became_another():
    def returned(key: str) -> Mutation:
        return setting("steps", 1, key, [{"fc1": "a", "relu": "b"}, {"fc1": "c", "relu": key}])

    unread = all_of(returned("activations"), returned("replayed_activations"))
    assert red(judged(unread)) == []
    verdict = judged(all_of(unread, setting("steps", 1, "losses", 1, [9.0])))
    assert of(verdict, "R3").where == {"step": 1, "rank": 1, "stage": "activation", "module": "relu"}


# --- kernels that are not deterministic --------------------------------------------------------------------------------


def noisy(excess: float | None) -> Mutation:
    return all_of(
        not_deterministic,
        setting("steps", 1, "local", 1, "fc1.bias", "noise"),
        setting("steps", 1, "losses", 1, [1.1 * (1 + 1e-7)]),
        setting("steps", 1, "local_excess", excess),
    )


def test_noise_is_compared_by_the_excess_ratio():
    verdict = judged(noisy(1.2))
    check = of(verdict, "R3")
    assert red(verdict) == []
    assert (check.status, check.quantity, check.threshold, check.origin) == ("passed", 1.2, 4.0, "measured")
    assert "deterministic=false" in check.detail


@pytest.mark.parametrize("excess", [4.1, math.inf, math.nan])
def test_more_than_noise_is_red(excess):
    check = of(judged(noisy(excess)), "R3")
    assert check.status == "failed" and check.threshold == 4.0 and check.origin == "measured"
    assert check.where == {"step": 1, "rank": 1, "stage": "local gradient", "tensor": "fc1.bias"}


def test_noise_that_nobody_measured_is_not_checked():
    verdict = judged(noisy(None))
    assert red(verdict) == []
    assert "no excess ratio was measured (step 1, rank 1" in unchecked(verdict)["R3"]


def test_a_loss_beyond_noise_and_a_lost_gradient_are_red_all_the_same():
    assert "R3" in red(judged(all_of(noisy(1.0), setting("steps", 0, "losses", 0, [2.0 * (1 + 1e-5)]))))
    assert "R3" in red(judged(all_of(noisy(1.0), lambda evidence: evidence["steps"][1]["local"][1].pop("fc2.bias"))))
    assert "R3" in red(judged(all_of(noisy(None), setting("steps", 2, "losses", 0, [1.0]))))


def test_the_same_bits_pass_without_determinism():
    verdict = judged(not_deterministic)
    assert red(verdict) == [] and unchecked(verdict) == {}
    assert of(verdict, "R3").quantity == 0.0


def test_noise_does_not_accuse_buffers_or_the_observer():
    mutate = all_of(
        setting("steps", 0, "buffers", 1, "bn.running_mean", "noise"),
        setting("steps", 1, "before", 1, "bn.running_mean", "noise"),
        setting("observed_twice", 0, 1, "fc1.bias", "noise"),
    )
    assert red(judged(mutate)) == ["R11", "R13"]
    verdict = judged(all_of(mutate, not_deterministic))
    assert red(verdict) == []
    assert set(unchecked(verdict)) == {"R11", "R13"}
    assert "R11" in red(judged(all_of(mutate, not_deterministic, every_step("rng", 1, "rng 0 0"))))


def test_unit_round_offs():
    assert bounds.ROUND_OFF == {"float32": 2**-24, "float64": 2**-53, "bfloat16": 2**-8}


def test_sums_have_room_for_noise():
    def mutate(evidence: Any) -> None:
        sums = evidence["steps"][0]["loss"]
        sums["reference"][0][0] *= 1 + 1e-7
        evidence["evaluation"]["loss"][0] *= 1 + 1e-7

    assert red(judged(mutate)) == ["R9"]
    assert red(judged(all_of(mutate, not_deterministic))) == []


# --- reduction, update, ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "is_red"), [(0.0, False), (1.0, False), (1.0000001, True), (math.inf, True), (math.nan, True)]
)
def test_the_bound_of_the_reduction(ratio, is_red):
    assert red(judged(setting("steps", 2, "reduction_ratio", "fc1.bias", ratio), n=3)) == (["R4"] if is_red else [])


def test_what_synchronised_layers_exchange_is_checked_under_compression_too():
    exchanged = every_step("exchange_ratio", {"bn": 0.4})
    also = "; statistics of 1 synchronised layer are those of the ranks' batches"
    assert of(judged(exchanged), "R4").detail.endswith(also)
    compressed = all_of(exchanged, setting("comm_hook", "powersgd"))
    assert unchecked(judged(compressed))["R4"].endswith(also)
    verdict = judged(all_of(compressed, setting("steps", 1, "exchange_ratio", {"bn": math.inf})))
    assert red(verdict) == ["R4"]
    assert of(verdict, "R4").where == {"step": 1, "stage": "statistics", "tensor": "bn"}
    assert of(judged(every_step("exchange_ratio", {"bn": 0.9}), n=3), "R4").quantity == 0.9


def test_how_the_reduction_is_told():
    said = [of(judged(badly_reduced(ratio), n=n), "R4").detail for ratio, n in ((3.1e5, 3), (math.inf, 2), (math.nan, 4))]
    assert said[0] == "3.1e+05 times the bound, on all ranks alike"
    assert said[1].startswith("not the mean of both ranks' gradients, whose bits must agree at nprocs=2")
    assert said[2].startswith("the error is not a number")
    assert of(judged(badly_reduced(math.inf), n=3), "R4").detail.startswith("inf times the bound")


def test_a_gradient_that_is_lost_in_the_reduction():
    verdict = judged(setting("steps", 0, "reduced", [{**digests(PARAMETERS, "reduced", 0), "fc1.bias": "none"}] * 2))
    assert red(verdict) == ["R4"]
    assert of(verdict, "R4").where == {"step": 0, "rank": 0, "stage": "reduced gradient", "tensor": "fc1.bias"}
    assert of(verdict, "R4").detail == "local gradients have no reduced one"
    from_nothing = judged(all_of(*(setting("steps", 0, "local", rank, "fc1.bias", "none") for rank in (0, 1))))
    assert of(from_nothing, "R4").detail == "it is reduced from no local gradient"


def test_a_gradient_that_nobody_has_may_stay_none():
    def mutate(evidence: Any) -> None:
        evidence["find_unused_parameters"] = True
        for step in evidence["steps"]:
            for key in ("local", "replayed_local", "reduced"):
                for gradients in step[key]:
                    gradients["fc1.bias"] = "none"
            step["reduction_ratio"]["fc1.bias"] = 0.0
            step["movement"]["fc1.bias"] = [False, False, True, False, False]

    assert red(judged(mutate)) == []
    assert red(judged(all_of(mutate, setting("find_unused_parameters", False)))) == ["R14"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_three_ranks_the_odd_one_is_named(rank):
    verdict = judged(setting("steps", 1, "reduced", rank, "fc1.bias", "odd"), n=3)
    assert of(verdict, "R4").where == of(verdict, "R6").where
    assert (of(verdict, "R4").where or {})["rank"] == rank


def test_what_changes_between_two_steps_on_all_ranks_is_seen():
    """The replay starts from the run's own state, so that only the chain of states shows it."""
    mutate = all_of(*(setting("steps", 2, "before", rank, "fc1.weight", "shifted") for rank in (0, 1)))
    verdict = judged(mutate)
    assert red(verdict) == ["R5"]
    assert of(verdict, "R5").where == {"step": 2, "rank": 0, "stage": "state before", "tensor": "fc1.weight"}
    mutate = all_of(*(setting("steps", 2, "before", rank, "bn.running_mean", "reset") for rank in (0, 1)))
    assert red(judged(mutate)) == ["R11"]
    assert red(judged(setting("steps", 0, "before", [{**state(1), **buffers(0, 0)}] * 2))) == ["R5"]


def test_steps_that_do_not_follow_one_another_are_not_linked():
    def mutate(evidence: Any) -> None:
        for key in ("steps", "observed_twice", "float64", "own_precision"):
            del evidence[key][1]

    assert red(judged(mutate)) == []


def test_a_run_that_was_resumed_is_not_linked_to_its_birth():
    def mutate(evidence: Any) -> None:
        for key in ("steps", "float64", "own_precision"):
            for each in evidence[key]:
                each["step"] += 10
        evidence["birth"] = [{**state(7), **buffers(0, 0)} for _ in range(2)]
        evidence["reference_birth"] = evidence["birth"][0]

    assert red(judged(mutate)) == []


def test_rank_zeros_buffers_before_a_step_are_right_too():
    assert red(judged(setting("steps", 1, "before", 1, {**state(1), **buffers(1, 0)}))) == []


def test_drift_between_ranks():
    verdict = judged(setting("steps", 1, "before", 2, "fc2.weight", "drift"), n=3)
    assert red(verdict) == ["R5", "R6"]
    assert of(verdict, "R6").where == {"step": 1, "rank": 2, "stage": "state before", "tensor": "fc2.weight"}
    verdict = judged(setting("steps", 1, "lr", 2, [0.06]), n=3)
    assert of(verdict, "R6").where == {"step": 1, "rank": 2, "stage": "lr"}
    assert of(verdict, "R6").detail == "learning rates [0.06] against [0.05]"


def test_every_parameter_group_has_its_learning_rate():
    verdict = judged(every_step("lr", [[0.1, 0.1]] * 2))
    assert "2 learning rates where 1 are declared" in of(verdict, "R5").detail


# --- mathematics, report, buffers, observer, movement --------------------------------------------------------------------


@pytest.mark.parametrize(("key", "name", "most"), [("float64", "R7", 1.0), ("own_precision", "R8", 4.0)])
def test_the_bounds_of_mathematics(key, name, most):
    for ratio, is_red in ((most, False), (most * 1.001, True), (math.nan, True), (math.inf, True)):
        verdict = judged(setting(key, 1, "ratios", "fc1.bias", ratio))
        assert red(verdict) == ([name] if is_red else [])
    assert (of(verdict, name).where or {}) == {"step": 1, "stage": "gradient", "tensor": "fc1.bias"}


@pytest.mark.parametrize(("key", "name", "most"), [("float64", "R7", 1e-11 * 2**53), ("own_precision", "R8", 32.0)])
def test_the_bounds_of_the_loss(key, name, most):
    for error, is_red in ((most, False), (most * 1.001, True), (math.nan, True)):
        assert red(judged(setting(key, 1, "loss_error", error))) == ([name] if is_red else [])
    verdict = judged(setting(key, 0, "loss_error", most * 2))
    assert of(verdict, name).where == {"step": 0, "stage": "loss"}
    assert of(verdict, name).threshold == most


@pytest.mark.parametrize("key", ["float64", "own_precision"])
def test_a_tensor_that_was_not_compared_with_the_whole_batch(key):
    for mutate in (lambda evidence: evidence[key][0]["ratios"].pop("fc1.bias"), setting(key, 0, "ratios", "fc9.bias", 0.0)):
        failed = judged(mutate).failed
        assert failed is not None and failed.where is not None
        assert failed.where["stage"] == "gradient" and failed.where["tensor"] in ("fc1.bias", "fc9.bias")


def test_the_mean_is_over_all_ranks():
    evidence = green(2)
    sums = {"ranks": [[6.0, 3.0], [4.0, 1.0]], "reference": [[6.0, 3.0], [4.0, 1.0]], "reported": 2.5}
    evidence["steps"][0]["loss"] = sums
    assert red(judge(evidence)) == []
    sums["reported"] = 2.5 * (1 + 1e-13)
    assert red(judge(evidence)) == []
    for reported in (3.0, 2.0, 2.5 * (1 + 1e-11), math.nan):
        sums["reported"] = reported
        assert red(judge(evidence)) == ["R9"]


def test_one_sample_has_a_mean():
    evidence = green(2)
    sums = {"ranks": [[0.25, 1.0], [0.0, 0.0]], "reference": [[0.25, 1.0], [0.0, 0.0]], "reported": 0.25}
    evidence["steps"][0]["loss"] = sums
    assert red(judge(evidence)) == []
    sums["reported"] = 0.25 + 1e-9
    assert red(judge(evidence)) == ["R9"]
    assert of(judge(evidence), "R9").quantity == pytest.approx(4e-9)


def test_a_rank_without_a_sample_counts_nothing():
    evidence = green(2)
    sums = {"ranks": [[6.0, 3.0], [0.0, 0.0]], "reference": [[6.0, 3.0], [0.0, 0.0]], "reported": 2.0}
    evidence["steps"][0]["loss"] = sums
    assert red(judge(evidence)) == []
    sums["ranks"][0] = sums["reference"][0] = [0.0, 0.0]
    sums["reported"] = 0.0
    assert red(judge(evidence)) == ["R9"]


def test_sums_that_cancel_are_not_accused():
    evidence = green(2)
    sums = [[1e8, 4.0], [-1e8 + 1e-3, 4.0]]
    evidence["steps"][0]["loss"] = {"ranks": sums, "reference": sums, "reported": 1.25e-4 + 1e-6}
    evidence["evaluation"]["score"], evidence["reference_evaluation"]["score"] = [1e-16, 40.0], [3e-15, 40.0]
    assert red(judge(evidence)) == []


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (setting("steps", 1, "loss", "ranks", 1, [4.4, 3.0]), "3.0 losses are counted where the reference counts 4.0"),
        (setting("steps", 1, "loss", "ranks", 1, [4.5, 4.0]), "losses add up to 4.5 where the reference has 4.4"),
        (setting("evaluation", "correct", [31.0, 41.0]), "41.0 items are counted where the reference counts 40.0"),
        (setting("evaluation", "correct", [32.0, 40.0]), "items add up to 32.0 where the reference has 31.0"),
        (setting("evaluation", "new", [1.0, 1.0]), "it is not known to the reference"),
        (lambda evidence: evidence["evaluation"].pop("loss"), "it is not reported"),
        (setting("evaluation", None), "it is not reported"),
        (setting("reference_evaluation", None), "it is not known to the reference"),
    ],
)
def test_reports(mutate, said):
    verdict = judged(mutate)
    assert red(verdict) == ["R9"]
    assert said in of(verdict, "R9").detail


def test_a_metric_that_is_drawn_at_random_is_not_compared():
    wrong, again = setting("evaluation", "correct", [32.0, 40.0]), {**green(2)["evaluation"], "correct": [30.0, 40.0]}
    verdict = judged(all_of(wrong, setting("evaluated_again", [green(2)["evaluation"], again])))
    assert red(verdict) == []
    assert "1 metric are means over all ranks; correct: not checked, evaluation draws at random" in of(verdict, "R9").detail
    assert red(judged(all_of(wrong, setting("evaluated_again", [green(2)["evaluation"]])))) == ["R9"]


def test_a_run_without_evaluation_has_its_losses_checked():
    verdict = judged(all_of(setting("evaluation", None), setting("reference_evaluation", None)))
    assert red(verdict) == []
    assert "metric" not in of(verdict, "R9").detail and "2 metrics" in of(judge(green(2)), "R9").detail


def test_buffers_and_streams():
    assert "no dropout" in unchecked(judged(all_of(without_buffers, setting("uses_random", False))))["R11"]
    assert of(judged(without_buffers), "R11").detail == "all ranks' random streams differ, at steps 0, 1, 2"
    assert of(judged(setting("uses_random", False)), "R11").detail.startswith("buffers are the replay's in bits, at")
    lost_buffers = all_of(without_buffers, setting("has_batch_norm", True))
    assert "no buffer of it was recorded" in unchecked(judged(lost_buffers))["R11"]
    same_streams = every_step("rng", ["one", "one"])
    assert red(judged(all_of(same_streams, setting("uses_random", False)))) == []
    assert red(judged(all_of(with_sync_bn, same_streams))) == ["R11"]
    assert red(judged(all_of(without_buffers, setting("sync_bn", True)))) == []


def test_ranks_that_repeat_each_others_noise():
    def read(changes: list[int], digests: list[str], why_not: str = "") -> Mutation:
        return setting("readings", {"number": 64, "changes": changes, "digests": digests, "why_not": why_not})

    verdict = judged(read([63, 63, 60], ["a", "b", "b"]), n=3)
    assert red(verdict) == ["R11"] and of(verdict, "R11").where == {"step": 0, "rank": 2, "stage": "data set"}
    assert of(verdict, "R11").detail.startswith("its data set repeats the noise of rank 1's")
    # What never changes is drawn by nobody, and a cache that fills changes once.
    for fine in (read([63, 63], ["a", "b"]), read([0, 0], ["a", "a"]), read([1, 1], ["a", "a"]), setting("readings", None)):
        assert red(judged(fine)) == []
    assert "no rank's data set repeats the noise of another's" in of(judged(read([3, 0], ["a", "b"])), "R11").detail
    nothing_else = all_of(without_buffers, setting("uses_random", False))
    assert "data set" not in unchecked(judged(all_of(nothing_else, read([0, 0], ["a", "a"]))))["R11"]
    assert of(judged(all_of(nothing_else, read([3, 3], ["a", "b"]))), "R11").status == "passed"
    unread = read([0, 0], ["a", "a"], "rank 1 could not read a copy of it")
    assert "not checked: rank 1 could not" in of(judged(unread), "R11").detail
    assert "not checked: rank 1 could not" in unchecked(judged(all_of(nothing_else, unread)))["R11"]
    assert red(judged(read([63], ["a"]))) == ["R11"]


def test_streams_of_the_devices_own_generators():
    assert red(judged(every_step("device_rng", ["", ""]))) == []
    assert red(judged(every_step("device_rng", ["one", "two"]))) == []
    verdict = judged(every_step("device_rng", ["one", "one"]))
    assert red(verdict) == ["R11"] and of(verdict, "R11").where == {"step": 0, "rank": 1, "stage": "rng"}


def test_the_observer():
    verdict = judged(setting("observed_twice", 1, 1, "fc1.bias", "other"))
    assert red(verdict) == ["R13"]
    assert of(verdict, "R13").where == {"step": 1, "rank": 0, "stage": "state after", "tensor": "fc1.bias"}
    assert "not taken twice" in unchecked(judged(setting("observed_twice", None)))["R13"]


@pytest.mark.parametrize(
    ("flags", "is_red"),
    [
        ([True, True, True, True, True], False),
        ([False, False, True, False, False], True),  # no gradient
        ([True, True, True, False, True], True),  # stands still
        ([True, True, True, False, False], True),  # in the replay too: the recipe's optimizer does not have it
        ([True, False, True, False, False], False),  # a gradient of zero
        ([True, False, True, True, True], False),  # moved by momentum or weight decay
        ([True, False, True, True, False], True),
        ([True, True, False, False, False], False),  # lr 0 in a warm-up
        ([True, True, False, True, False], True),
        ([True, True, True, True, False], False),  # R5's to say
        ([True, True, True, True], True),
    ],
)
def test_movement(flags, is_red):
    verdict = judged(setting("steps", 1, "movement", "fc2.weight", flags))
    assert red(verdict) == (["R14"] if is_red else [])
    if is_red:
        assert of(verdict, "R14").where == {"step": 1, "rank": 0, "stage": "movement", "tensor": "fc2.weight"}


def test_movement_is_of_what_is_trained():
    verdict = judged(setting("steps", 1, "movement", "fc9.bias", [True] * 5))
    assert of(verdict, "R14").detail == "it is not one that is trained"
    verdict = judged(lambda evidence: evidence["steps"][1]["movement"].pop("fc1.bias"))
    assert of(verdict, "R14").detail == "its movement was not recorded"


def test_what_the_replay_would_have_moved_is_unknown_without_one():
    still = setting("steps", 2, "movement", "fc2.weight", [True, False, True, True, False])
    unknown = lambda evidence: evidence["steps"][2].update(replayed_after=None, not_replayed="not this step")  # noqa: E731
    assert red(judged(still)) == ["R14"]
    assert red(judged(all_of(still, unknown))) == []


# --- what is said ----------------------------------------------------------------------------------------------------


def test_a_red_verdict_in_words():
    first, second = judged(not_reduced("fc2.bias")).sentences()
    assert first == (
        "R4 (reduction) is red at step 0, rank 1, tensor fc2.bias: 3.1e+05 times the bound. Usual causes: a tensor is not "
        "reduced, the sum is taken for the mean, the mean is divided by the number of ranks again, a bucket is one step old, "
        "no_sync or compression was left on, or bits were lost on the wire."
    )
    assert second == "Also red, and probably for the same reason: R6 (ranks)."


def test_a_stage_is_named_where_the_check_has_several():
    assert "is red at step 1, rank 1, buffers, tensor bn.running_mean: the bits differ" in judged(FAULTS[13][1]).sentences()[0]
    assert "is red at rank 1: its threads is 2" in judged(setting("facts", 1, "threads", 2)).sentences()[0]
    assert "is red at step 3, rank 0, epoch 0, id 9: 1 ids" in judged(FAULTS[7][1]).sentences()[0]
    assert "is red at metric correct:" in judged(FAULTS[36][1]).sentences()[0]
    assert "excess ratio 3e+04, at most 4 (measured)" in of(judged(FAULTS[25][1]), "R8").detail


def test_what_was_not_checked_in_words():
    assert of(judge(green(tier="quick")), "R7").sentence() == (
        "R7 (mathematics) was not checked: compare=quick leaves it out, compare=full runs it."
    )
    assert of(judge(green(2)), "R6").sentence() == (
        "R6 (ranks) is green: states, lr, gradients of 2 ranks are equal in bits at steps 0, 1, 2."
    )


def test_every_check_of_the_ladder_has_its_words():
    assert list(check._ABOUT) == [f"R{number}" for number in range(15)]
    assert all(about.causes and about.title for about in check._ABOUT.values())


def test_the_earliest_step_names_the_fault_and_then_the_ladder():
    late, early = setting("steps", 1, "local", 0, "fc1.bias", "other"), setting("steps", 0, "after", 1, "fc1.bias", "other")
    verdict = judged(all_of(late, early))
    assert red(verdict) == ["R3", "R5", "R6"]
    assert verdict.label == "FAILED R5"
    assert verdict.sentences()[1].endswith("R3 (local replay), R6 (ranks).")
    unfinished = setting("evaluation", None)
    assert judged(all_of(unfinished, late)).label == "FAILED R3"
    assert judged(all_of(early, setting("birth", 1, "fc1.bias", "other"))).label == "FAILED R2"
    assert judged(all_of(early, setting("partition", "missing", 1))).label == "FAILED R1"
    assert judged(all_of(early, setting("own_precision", []))).label == "FAILED R8"


def test_nothing_checked_is_nothing_proven():
    assert Verdict(()).label == "not checked"
    assert Verdict((check.not_checked("R3", "no"),)).label == "not checked"
    assert not Verdict(()).is_proof


def test_checks_from_elsewhere_take_their_place():
    verdict = judge(green(2))
    launcher, resume = check.passed("R10", "same"), check.not_checked("R12", "no checkpoint")
    joined_by = verdict.joined_by(resume, launcher)
    assert [each.name for each in joined_by.checks] == [f"R{number}" for number in range(15)]
    assert joined_by.label == "equal to 1 process: 14 of 14 checks"
    wrong = check.failed("R13", check.Mismatch("other", "parameters", 0))
    assert verdict.joined_by(wrong).label == "FAILED R13"
    assert verdict.joined_by(wrong).joined_by(check.passed("R13", "")).label == "FAILED R13"
    assert verdict.joined_by(check.not_checked("R13", "")).label == verdict.label
    twice = verdict.joined_by(check.passed("R13", "one")).joined_by(check.passed("R13", "two"))
    assert next(each.detail for each in twice.checks if each.name == "R13").endswith("one; two")


# --- runs against runs -----------------------------------------------------------------------------------------------


def chain(n: int = 2, dones: tuple[int, ...] = (0, 1, 2, 3, 8)) -> list[list[dict[str, Any]]]:
    return [
        [{"done": done, "parameters": f"p{done}", "buffers": f"b{done} {rank}", "optimizer": f"o{done}"} for done in dones]
        for rank in range(n)
    ]


def test_ranks_that_drift_late_are_red():
    verdict = checks_runs.compare_ranks(chain(3), synchronised=False)
    assert (verdict.name, verdict.status) == ("R6", "passed")
    assert verdict.detail == "parameters and optimizer of 3 ranks are equal in bits, after 0, 1, 2, 3, 8 steps"
    assert checks_runs.compare_ranks(chain(3), synchronised=True).where == {"step": 0, "rank": 1, "stage": "buffers at birth"}
    drifted = chain(3)
    drifted[2][4]["optimizer"] = "other"
    verdict = checks_runs.compare_ranks(drifted, synchronised=False)
    assert verdict.where == {"step": 7, "rank": 2, "stage": "optimizer"} and "drift apart" in verdict.causes
    del drifted[1][3]
    verdict = checks_runs.compare_ranks(drifted, synchronised=False)
    assert verdict.where == {"step": 2, "rank": 1, "stage": "parameters"} and verdict.detail == "it left no such digest"
    assert checks_runs.compare_ranks(chain(1), synchronised=False).status == "not checked"
    assert checks_runs.compare_ranks([[], []], synchronised=False).status == "not checked"


def test_two_launchers_agree():
    verdict = checks_runs.compare_chains(chain(), chain(), ("job 0", "job 3"))
    assert (verdict.name, verdict.status) == ("R10", "passed")
    assert verdict.detail == "job 0 and job 3 left the same digests on 2 ranks, after 0, 1, 2, 3, 8 steps"


def test_what_differs_first_between_launchers_is_named():
    other = chain()
    other[1][2]["buffers"] = "other"
    other[0][4]["parameters"] = "other"
    other[1][2]["optimizer"] = "other"
    verdict = checks_runs.compare_chains(chain(), other, ("job 0", "job 3"))
    assert verdict.where == {"step": 1, "rank": 1, "stage": "buffers"}
    assert verdict.sentence().startswith(
        "R10 (launcher) is red at step 1, rank 1, buffers: the bits of job 0 and job 3 differ."
    )
    other[0][0]["parameters"] = "other"
    verdict = checks_runs.compare_chains(chain(), other)
    assert verdict.where == {"step": 0, "rank": 0, "stage": "parameters at birth"}
    assert checks_runs.compare_chains(chain(), other, deterministic=False).status == "not checked"
    assert checks_runs.compare_chains(chain(), chain(), deterministic=False).status == "passed"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: run.pop(),
        lambda run: run[1].pop(),
        lambda run: run[1].clear(),
        lambda run: [each.clear() for each in run],
        lambda run: run[0][1].pop("buffers"),
        lambda run: run[0][1].update(buffers=""),
        lambda run: run[0][1].update(buffers=None),
    ],
)
def test_missing_digests_are_not_equal(spoil):
    other = chain()
    spoil(other)
    assert checks_runs.compare_chains(chain(), other).status == "failed"
    assert checks_runs.compare_chains(other, chain()).status == "failed"


def test_what_both_runs_lack_is_not_equal_either():
    for spoil in (lambda run: run[1].clear(), lambda run: run[1].pop(), lambda run: run[0][1].update(buffers="")):
        other = chain()
        spoil(other)
        assert checks_runs.compare_chains(other, copy.deepcopy(other)).status == "failed"


def test_runs_without_digests_are_not_checked():
    assert checks_runs.compare_chains([], []).status == "not checked"
    assert checks_runs.compare_chains([[], []], [[], []]).status == "not checked"
    assert checks_runs.compare_chains([[{"done": 0}]], [[{"done": 0}]]).status == "failed"


def test_verifications_are_compared_tensor_by_tensor():
    evidence = green(2)
    assert (
        checks_runs.compare_chains(checks_runs.evidence_chains(evidence), checks_runs.evidence_chains(green(2))).status
        == "passed"
    )
    evidence["steps"][2]["after"][0]["fc9.bias"] = "more"
    verdict = checks_runs.compare_chains(checks_runs.evidence_chains(green(2)), checks_runs.evidence_chains(evidence))
    assert verdict.where == {"step": 2, "rank": 0, "stage": "state after", "tensor": "fc9.bias"}
    evidence["steps"][1]["local"][1].update({"fc1.bias": "other", "fc2.weight": "other"})
    evidence["steps"][1]["reduced"][0]["fc2.bias"] = "other"
    verdict = checks_runs.compare_chains(checks_runs.evidence_chains(green(2)), checks_runs.evidence_chains(evidence))
    assert verdict.where == {"step": 1, "rank": 1, "stage": "local gradient", "tensor": "fc2.weight"}


def test_verifications_of_two_launchers_are_compared():
    evidence = green(2)
    evidence["steps"][1]["local"][1]["fc2.weight"] = "other"
    verdict = checks_runs.compare_verifications(plan(), green(2), plan(job=3), evidence)
    assert verdict.where == {"step": 1, "rank": 1, "stage": "local gradient", "tensor": "fc2.weight"}
    assert verdict.detail == "the bits of the verification of job 0 and that of job 3 differ"
    assert checks_runs.compare_verifications(plan(), green(2), plan(job=3), green(2)).status == "passed"
    with pytest.raises(NotComparable):
        checks_runs.compare_verifications(plan(), green(2), trained(plan(), seed=1), green(2))


def test_what_one_run_lacks_is_told():
    shorter = green(2)
    for key in ("steps", "observed_twice"):
        del shorter[key][2]
    verdict = checks_runs.compare_chains(
        checks_runs.evidence_chains(green(2)), checks_runs.evidence_chains(shorter), ("job 0", "job 3")
    )
    assert verdict.where == {"step": 2, "rank": 0, "stage": "rng"} and verdict.detail == "job 3 left no such digest"
    verdict = checks_runs.compare_chains(chain(dones=(0, 1)), chain(dones=(0,)), ("job 0", "job 3"))
    assert verdict.where == {"step": 0, "rank": 0, "stage": "parameters"} and verdict.detail == "job 3 left no such digest"
    verdict = checks_runs.compare_chains(chain(dones=(0,)), chain(dones=(0, 1)), ("job 0", "job 3"))
    assert verdict.detail == "job 0 left no such digest"


def test_resumed_runs():
    resumed = chain(dones=(4, 5, 6, 7, 8))
    verdict = checks_runs.compare_resumed(chain(), resumed)
    assert (verdict.name, verdict.status) == ("R12", "passed") and "after 8 steps" in verdict.detail
    resumed[1][-1]["optimizer"] = "lost"
    verdict = checks_runs.compare_resumed(chain(), resumed)
    assert verdict.where == {"step": 7, "rank": 1, "stage": "optimizer"} and "not restored" in verdict.causes
    assert checks_runs.compare_resumed(chain(), resumed, deterministic=False).status == "not checked"
    assert checks_runs.compare_resumed(chain(), chain(dones=(4,))).status == "not checked"
    assert checks_runs.compare_resumed(chain(), chain(n=3)).status == "failed"


def test_a_resumed_run_begins_with_rank_0s_buffers():
    whole, resumed = chain(), chain(dones=(1, 2, 8))
    for number, link in enumerate(whole[1]):
        link["buffers"] = f"of rank 1, {number}"
    after = {link["done"]: link["buffers"] for link in whole[1]}
    for link in resumed[1]:
        link["buffers"] = after.get(link["done"], "")
    assert checks_runs.compare_resumed(whole, resumed).where == {"step": 0, "rank": 1, "stage": "buffers"}
    resumed[1][0]["buffers"] = whole[0][1]["buffers"]
    assert checks_runs.compare_resumed(whole, resumed).status == "passed"


def test_a_data_set_that_goes_on_is_not_compared_with_the_verification():
    evidence = green(2)
    evidence["data_goes_on"] = True
    check = checks_runs.compare_observed(evidence, [])
    assert check.status == "not checked" and "generator of its own" in check.detail


def test_only_buffers_of_synchronised_layers_must_agree():
    evidence = green(2)
    evidence["sync_bn"] = True
    for rank, buffers in enumerate(evidence["steps"][0]["buffers"]):
        buffers["own"] = f"of rank {rank}"
    for names, is_red in ((["own"], True), ([], False)):
        evidence["synchronised"] = names
        assert ("R6" in red(judge(evidence))) is is_red
        assert not checks_runs.are_all_synchronised(evidence)


# --- may they be compared --------------------------------------------------------------------------------------------


def plan(**changes: Any) -> RunPlan:
    train = TrainPlan({"_target_": "recipes.mnist.Mnist", "lr": 0.1}, compare="quick")
    return RunPlan(Task("hydra", module="run", name="main", line=12), nprocs=2, backend="gloo", train=train, **changes)


def trained(of: RunPlan, **changes: Any) -> RunPlan:
    return dataclasses.replace(of, train=dataclasses.replace(of.train, **changes))  # type: ignore[type-var]


def test_how_runs_were_started_is_no_difference():
    other = plan(job=3, method="torchrun", start_method="fork", argv=("run.py", "launcher=torchrun"), cwd="/elsewhere")
    other = trained(dataclasses.replace(other, timeout_s=5.0, max_restarts=2), log_every=1, on_mismatch="warn")
    assert plans.differences(plan(), other) == {}
    assert plans.may_share_reference(plan(), other)
    plans.require_same_training(plan(), other)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (trained(plan(), global_batch_size=128), {"global_batch_size": (64, 128)}),
        (dataclasses.replace(plan(), nprocs=4, threads=2), {"nprocs": (2, 4), "threads": (1, 2)}),
        (trained(plan(), recipe={"_target_": "recipes.mnist.Mnist", "lr": 0.2}), {"recipe.lr": (0.1, 0.2)}),
        (
            trained(plan(), recipe={"_target_": "recipes.mnist.Mnist", "lr": 0.1, "momentum": 0.9}),
            {"recipe.momentum": ("not set", 0.9)},
        ),
        (
            dataclasses.replace(plan(), settings={"OMP_WAIT_POLICY": "active"}),
            {"settings.OMP_WAIT_POLICY": ("not set", "active")},
        ),
        (trained(plan(), fault="sum"), {"fault": (None, "sum")}),
        (dataclasses.replace(plan(), task=Task("hydra", module="run", name="main", line=99)), {}),
        (dataclasses.replace(plan(), task=Task("hydra", module="app", name="main")), {"task.module": ("run", "app")}),
    ],
)
def test_differences(other, expected):
    assert plans.differences(plan(), other) == expected
    assert plans.may_share_reference(plan(), other) is (expected == {})


def test_runs_that_differ_are_refused():
    other = trained(plan(job=3), global_batch_size=128, seed=1)
    with pytest.raises(NotComparable) as caught:
        plans.require_same_training(other, plan())
    assert str(caught.value) == "job 3 cannot be compared with job 0: global_batch_size is 128 against 64, seed is 1 against 0."
    result = RunResult("ok", tuple(RankResult(rank, digests=tuple(each)) for rank, each in enumerate(chain())))
    with pytest.raises(NotComparable):
        checks_runs.compare_runs(other, result, plan(), result)
    assert checks_runs.compare_runs(plan(job=3), result, plan(), result).status == "passed"


def test_a_nan_setting_is_equal_to_itself():
    assert plans.differences(trained(plan(), recipe={"x": math.nan}), trained(plan(), recipe={"x": math.nan})) == {}


def test_a_reference_is_shared_at_the_same_depth_only():
    assert not plans.may_share_reference(plan(), trained(plan(), compare="full"))
    assert not plans.may_share_reference(trained(plan(), compare="off"), trained(plan(), compare="off"))
    assert not plans.may_share_reference(dataclasses.replace(plan(), train=None), dataclasses.replace(plan(), train=None))


# --- the training against its verification ------------------------------------------------------------------------------


def recorded(n: int = 2) -> list[list[dict[str, Any]]]:
    """Return what the recorder leaves of the training that ``green`` verified, up to its end."""

    def link(done: int, rank: int) -> dict[str, Any]:
        names = state(done)
        optimizer = {name: each for name, each in names.items() if name not in PARAMETERS}
        parameters = {name: names[name] for name in PARAMETERS}
        kinds = {"parameters": joined(parameters), "buffers": joined(buffers(done, rank)), "optimizer": joined(optimizer)}
        return {"done": done, **kinds}

    return [[*(link(done, rank) for done in range(4)), {"done": 100, "parameters": "p"}] for rank in range(n)]


def test_the_training_is_what_was_verified():
    verdict = checks_runs.compare_observed(green(2), recorded())
    assert (verdict.name, verdict.status) == ("R13", "passed")
    assert verdict.detail == "the training has the digests of what was verified, after 0, 1, 2, 3 steps"


@pytest.mark.parametrize(("kind", "stage"), [("parameters", "parameters"), ("buffers", "buffers"), ("optimizer", "optimizer")])
def test_a_training_that_is_not_what_was_verified(kind, stage):
    digests_of = recorded()
    digests_of[1][2][kind] = "other"
    verdict = checks_runs.compare_observed(green(2), digests_of)
    assert verdict.where == {"step": 1, "rank": 1, "stage": stage}
    evidence = green(2)
    evidence["deterministic"] = False
    assert checks_runs.compare_observed(evidence, digests_of).status == "not checked"
    del digests_of[1][2][kind]
    assert checks_runs.compare_observed(green(2), digests_of).status == "failed"


def test_a_training_that_cannot_be_compared_with_its_verification():
    later = [[link for link in each if link["done"] > 3] for each in recorded()]
    assert checks_runs.compare_observed(green(2), later).status == "not checked"
    assert checks_runs.compare_observed(green(2), []).status == "not checked"
    assert checks_runs.compare_observed(green(2), recorded(3)).status == "failed"
    one_rank_lost_a_line = recorded()
    del one_rank_lost_a_line[1][1]
    assert checks_runs.compare_observed(green(2), one_rank_lost_a_line).status == "failed"


def test_a_module_may_be_called_optimizer():
    link = checks_runs.by_kind(1, {"optimizer.weight": "a", "optimizer.0.momentum": "b"}, {}, {"optimizer.weight": "g"})
    assert link["parameters"] == joined({"optimizer.weight": "a"})
    assert link["optimizer"] == joined({"optimizer.0.momentum": "b"})


# --- the audit -------------------------------------------------------------------------------------------------------


def test_the_audit_counts():
    trials = [
        *(Trial("none", (), None, 0.0, True) for _ in range(59)),
        Trial("none", (), "R3", 2e-4, True),
        *(Trial("sum", ("R4", "R7"), "R4", 1e-6, True) for _ in range(3)),
        Trial("skip", ("R5",), "R6", 2e-3, False),
        Trial("skip", ("R5",), "R5", math.nan, False),
        Trial("lost", ("R4",), None, 1e-5, True),
    ]
    rows = audit_table(trials)
    assert [row.fault for row in rows] == ["sum", "skip", "lost", "none"]
    assert [(row.red, row.as_expected, row.trials, row.is_right) for row in rows] == [
        (3, 3, 3, True),
        (2, 1, 2, False),
        (0, 0, 1, False),
        (1, 0, 60, False),
    ]
    assert rows[0].by_older_rules == {"loss within 1e-3": 0, "loss within 1e-5": 0, "assert_close": 0}
    assert rows[1].by_older_rules == {"loss within 1e-3": 2, "loss within 1e-5": 2, "assert_close": 2}
    assert rows[3].by_older_rules["loss within 1e-5"] == 1
    assert rows[2].fired is None


def test_the_audit_in_words():
    row = AuditRow("none", (), None, 0, 0, 60)
    assert row.sentence() == "false alarms 0 of 60, below 4.9% (95 %)" and row.is_right
    row = AuditRow("sum", ("R4", "R7"), "R4", 5, 5, 5)
    assert row.sentence() == "caught 5 of 5, above 54.9% (95 %), first by R4 (R4 or R7 expected)" and row.is_right
    assert AuditRow("sum", ("R4",), None, 0, 0, 5).sentence() == "caught 0 of 5, above 0.0% (95 %)"
    assert audit_table([]) == []


def test_the_ladder_in_an_audit():
    trials = [
        Trial(name, tuple(checks), red(judged(mutate, n=1 if number == 15 else 2))[0], 0.0, True)
        for number, (name, mutate, checks, _) in FAULTS.items()
    ]
    assert all(row.is_right for row in audit_table(trials))


# --- purity ----------------------------------------------------------------------------------------------------------


def test_it_needs_the_standard_library_alone():
    allowed = sys.stdlib_module_names | {"harness"}
    folder = Path(detection.__file__).parent
    files = [folder / "detection.py", *(folder / "correctness").glob("*.py")]
    assert len(files) > 9
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(module.split(".")[0] in allowed for module in modules), (path, modules)


def test_the_evidence_stays_as_it_was():
    evidence = green(3)
    judge(evidence)
    checks_runs.compare_observed(evidence, recorded(3))
    assert evidence == green(3)

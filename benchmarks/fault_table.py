"""What the checks catch, and whom they accuse: every fault on every recipe at 2, 3 and 4 ranks, and correct runs of all kinds.

Prints the tables of docs/faults.md as Markdown; a whole run takes some ten minutes on 2 cores::

    python -m benchmarks.fault_table
    python -m benchmarks.fault_table --recipes mnist --nprocs 2 --faults last_bias_not_reduced --correct 0
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import spawn
from harness.compare.detection import CORRECT, OLDER_RULES, Trial, audit_table
from harness.run import faults
from harness.run.faults import FAULTS
from harness.run.plan import Ddp, TrainPlan

RECIPES: dict[str, dict[str, Any]] = {
    "mnist": {"_target_": "recipes.mnist.Mnist", "width": 4, "hidden": 16},
    "se_resnext": {"_target_": "recipes.se_resnext.SEResNeXt", "width": 8, "cardinality": 4},
    "transformer": {"_target_": "recipes.transformer.Transformer", "num_layers": 1, "width": 16, "feedforward": 32},
}
RECIPES["transformer, sparse"] = {**RECIPES["transformer"], "sparse_embeddings": True}

SMALL: dict[str, Any] = {"global_batch_size": 17, "steps": 20}
"""Of the faulty runs: shards of unequal size at 2, 3 and 4 ranks."""

NEEDS: dict[str, dict[str, Any]] = {
    "accumulation_without_divisor": {"grad_accumulation": 2},
    "clipped_before_reduction": {"clip_norm": 0.1},
}
"""Settings without which a fault does not exist."""

OPTIMIZERS = ("SGD", "momentum", "nesterov", "Adam", "AdamW", "Adagrad", "RMSprop")


@dataclasses.dataclass(frozen=True)
class Case:
    """One training to verify, with or without a fault; ``label`` is its row or column."""

    label: str
    nprocs: int
    plan: TrainPlan


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case: a trial, or why its fault does not apply."""

    case: Case
    trial: Trial | None
    why_not: str = ""


# --- cases ---------------------------------------------------------------------------------------------------------------


def faulty_cases(recipes: Sequence[str], nprocs: Sequence[int], names: Sequence[str]) -> Iterator[Case]:
    """Yield every fault, at its smallest size, on every recipe and number of ranks, after a correct run of each."""
    for label in recipes:
        for ranks in nprocs:
            plain = TrainPlan(recipe=RECIPES[label], compare="full", **SMALL)
            yield Case(label, ranks, plain)
            for name in names:
                yield Case(label, ranks, dataclasses.replace(plain, fault=name, **NEEDS.get(name, {})))
            if "one_gradient_scaled" in names:
                yield Case(label, ranks, dataclasses.replace(plain, fault="one_gradient_scaled", precision="float64"))


def correct_cases(count: int, seed: int) -> list[Case]:
    """Return correct trainings of all kinds, drawn at random, the same for the same arguments."""
    rng = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        case = _drawn(rng, len(found))
        if not case.plan.problems(case.nprocs) and not _starves(case):
            found.append(case)
    return found


def _drawn(rng: random.Random, seed: int) -> Case:
    label = rng.choice([*RECIPES, "digits", "digits"])
    ranks = rng.choice((1, 2, 2, 3, 3, 4, 4))
    recipe = _digits(rng) if label == "digits" else dict(RECIPES[label])
    if rng.random() < 0.5:
        recipe["dropout"] = rng.choice((0.0, 0.3))
    plan = TrainPlan(
        recipe=recipe,
        compare="full",
        seed=seed,
        steps=rng.choice((3, 6, 50)),
        global_batch_size=rng.randrange(max(ranks, 3), 25),
        precision=rng.choice(("float32", "float32", "float32", "float64", "bfloat16")),
        grad_accumulation=rng.choice((1, 1, 2, 3)),
        clip_norm=rng.choice((None, None, 0.1, 10.0)),
        sync_bn=rng.random() < 0.4,
        num_workers=int(rng.random() < 0.05),
        ddp=Ddp(find_unused_parameters=rng.random() < 0.2),
    )
    return Case(label, ranks, plan)


def _digits(rng: random.Random) -> dict[str, Any]:
    optimizer, norm = rng.choice(OPTIMIZERS), rng.random() < 0.4
    return {"_target_": "benchmarks.digits.Digits", "optimizer": optimizer, "norm": norm}


def _starves(case: Case) -> bool:
    """Return True where BatchNorm would get one sample, or not the same number of pieces on all ranks."""
    return case.plan.global_batch_size < 3 * case.nprocs * case.plan.grad_accumulation


# --- in the ranks --------------------------------------------------------------------------------------------------------


def take(cases: Sequence[Case], verbose: bool = False) -> list[Outcome]:
    """Verify all cases in these ranks; return what came of them, on rank 0."""
    from harness.rank.context import current
    from harness.train import join
    from harness.training.recipe import make_recipe
    from harness.verify.audit import Trials
    from harness.verify.faults.seams import DoesNotApply

    rank, seat = current(), join(current(), cases[0].plan)
    trials: dict[str, Trials] = {}
    outcomes = []
    for case in cases:
        key = repr(case.plan.recipe)
        if key not in trials:
            recipe = make_recipe(case.plan.recipe)
            trials = {key: Trials(rank, recipe, recipe.dataset(), seat)}
        begin = time.monotonic()
        try:
            trial, why_not = trials[key].take(case.plan), ""
        except DoesNotApply as error:
            trial, why_not = None, str(error)
        outcomes.append(Outcome(case, trial, why_not))
        if seat.rank == 0 and verbose:
            print(_line(outcomes[-1], time.monotonic() - begin), file=sys.stderr, flush=True)
            verdict = trials[key].verdict
            if trial is not None and case.plan.fault is None and verdict is not None:
                print(*verdict.sentences(), sep="\n", end="", file=sys.stderr, flush=True)
    return outcomes if seat.rank == 0 else []


def _line(outcome: Outcome, seconds: float) -> str:
    case, trial = outcome.case, outcome.trial
    fired = outcome.why_not if trial is None else trial.fired
    wrong = trial is not None and (trial.fired not in trial.expected if trial.expected else trial.fired is not None)
    plan = {key: value for key, value in dataclasses.asdict(case.plan).items() if value != getattr(TrainPlan, key, None)}
    return f"{case.label} N={case.nprocs} {case.plan.fault}: {fired} {seconds:.2f} s" + (f" WRONG {plan}" if wrong else "")


# --- tables --------------------------------------------------------------------------------------------------------------


def fault_table(outcomes: Sequence[Outcome]) -> str:
    """Return a row for each fault: checks, first red one by recipe, k of n in all and by quick, and the older rules."""
    recipes = list(dict.fromkeys(o.case.label for o in outcomes))
    head = ["#", "fault", "smallest size", "check", *recipes, "caught", "by quick", *OLDER_RULES]
    rows = [head, ["---"] * len(head)]
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.case.plan.fault or CORRECT, []).append(outcome)
    rows += [_row(name, groups[name], recipes) for name in sorted(groups, key=_place)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _place(name: str) -> int:
    return FAULTS[name].number if name in FAULTS else 0


def _row(name: str, outcomes: Sequence[Outcome], recipes: Sequence[str]) -> list[str]:
    fault = FAULTS.get(name)
    trials = [o.trial for o in outcomes if o.trial is not None]
    by_recipe = [_first(o for o in outcomes if o.case.label == label) for label in recipes]
    comparable = [o.trial for o in outcomes if o.trial is not None and o.case.label == "mnist"]
    older = [f"{sum(not accepts(t) for t in comparable)} of {len(comparable)}" for accepts in OLDER_RULES.values()]
    caught = f"{sum(t.fired is not None for t in trials)} of {len(trials)}"
    # What compare=quick missed has been looked at by compare=full, which alone has R13.
    by_quick = f"{sum(t.fired is not None and 'R13' not in t.checks for t in trials)} of {len(trials)}"
    if fault is None:
        return ["", "none", "", "", *by_recipe, caught, by_quick, *older]
    return [str(fault.number), fault.name, _size(name), " ".join(fault.checks), *by_recipe, caught, by_quick, *older]


def _size(name: str) -> str:
    fault = FAULTS[name]
    if name == "one_gradient_scaled":
        return "2e-7, float64: 1e-10"
    if fault.size is None:
        return ""
    return f"bit {fault.size:g}" if fault.unit == "bit" else f"{fault.size:g} {fault.unit}"


def _first(outcomes: Iterable[Outcome]) -> str:
    """Return the checks that were red first, with their counts where they differ."""
    counts = Counter(o.trial.fired or "-" for o in outcomes if o.trial is not None)
    if not counts:
        return ""
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{check} {count}x" for check, count in counts.most_common())


def correct_table(outcomes: Sequence[Outcome]) -> str:
    """Return what was accused of the correct runs, by each property of theirs."""
    lines = ["| correct runs | accused | 95 % bound |", "| --- | --- | --- |", _accused("all", outcomes)]
    properties: list[tuple[str, Callable[[Outcome], object]]] = [
        ("recipe", lambda o: o.case.label),
        ("nprocs", lambda o: o.case.nprocs),
        ("precision", lambda o: o.case.plan.precision),
        ("optimizer", lambda o: o.case.plan.recipe.get("optimizer")),
    ]
    for title, of in properties:
        for value in sorted({str(of(o)) for o in outcomes} - {"None"}):
            lines.append(_accused(f"{title} {value}", [o for o in outcomes if str(of(o)) == value]))
    return "\n".join(lines)


def _accused(title: str, outcomes: Sequence[Outcome]) -> str:
    row = audit_table(o.trial for o in outcomes if o.trial is not None)[0]
    _, _, bound = row.sentence().partition(", ")
    return f"| {title} | {row.red} of {row.trials} | {bound} |"


# --- the command ---------------------------------------------------------------------------------------------------------


def main() -> int:
    """Verify all cases, a set of ranks for each number of them, and print the tables; 1 if a check was wrong."""
    asked = _parser().parse_args()
    nprocs = [int(number) for number in asked.nprocs.split(",")]
    names = list(FAULTS) if asked.faults == "all" else [name for name in asked.faults.split(",") if name]
    faulty = _taken([*faulty_cases(asked.recipes.split("+"), nprocs, names)] if names else [], asked.verbose)
    correct = _taken(correct_cases(asked.correct, asked.seed), asked.verbose)
    if asked.json:
        Path(asked.json).write_text(json.dumps([dataclasses.asdict(o) for o in (*faulty, *correct)], indent=1))
    if faulty:
        print(fault_table(faulty), end="\n\n")
    if correct:
        print(correct_table(correct))
    missed = [row for row in audit_table(o.trial for o in (*faulty, *correct) if o.trial is not None) if not row.is_right]
    for row in missed:
        print(f"WRONG: {row.fault}: {row.sentence()}")
    return int(bool(missed))


def _taken(cases: Sequence[Case], verbose: bool) -> list[Outcome]:
    outcomes = []
    for ranks in sorted({case.nprocs for case in cases}):
        of_ranks = [case for case in cases if case.nprocs == ranks]
        for case in of_ranks:
            outcomes += [Outcome(case, None, problem) for problem in faults.problems(case.plan, ranks)[:1]]
        known = {id(o.case) for o in outcomes}
        ready = [case for case in of_ranks if id(case) not in known]
        ready.sort(key=lambda case: repr(case.plan.recipe))
        if ready:
            outcomes += spawn(take, (ready, verbose), nprocs=ranks, backend="gloo", threads=1).return_values()[0]
    return outcomes


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--recipes", default="+".join(RECIPES), help="joined by +")
    made.add_argument("--nprocs", default="2,3,4")
    made.add_argument("--faults", default="all", help="names with commas between; empty: none")
    made.add_argument("--correct", type=int, default=300, help="correct runs")
    made.add_argument("--seed", type=int, default=0, help="of the correct runs' settings")
    made.add_argument("--verbose", action="store_true", help="a line for each case")
    made.add_argument("--json", help="file for all outcomes")
    return made


if __name__ == "__main__":
    sys.exit(main())

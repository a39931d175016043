"""What the proof says of recipes that were not written for it: writes docs/zoo.md, and is red where the proof was wrong.

Run it in its own environment, which has the models::

    make zoo
    .venv-zoo/bin/python -m benchmarks.zoo --only "GPT-2" --verbose --stdout
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.zoo.cases import Case, cases
from harness import spawn

AT_A_TIME = 12
"""Cases that share their ranks; where one of them breaks them, each is taken by itself."""

NOTHING_FOR_S = 120.0
REFUSED = "refused by a rank"

PAGE = """# The zoo: what the proof says of recipes that were not written for it

`make zoo` trains each of these for a few steps, on 2 ranks where nothing else is said, and writes this page. Whether several
ranks train what one process trains was stated beforehand (`benchmarks/zoo/cases.py`); the models are tiny ones, made from the
configurations of a library that everybody uses. A verdict is `equal` (proven), `red` (the first red check), `refused` (a
sentence instead of a training) or `not proven` (with the reason).

"""


@dataclass(frozen=True)
class Outcome:
    """What was said of a case.

    Attributes:
        verdict: ``equal``, ``red``, ``refused``, ``not proven``, or ``broke``: an error that is no verdict.
        detail: First red check, or the reason.
    """

    case: Case
    verdict: str
    detail: str
    seconds: float

    @property
    def sort(self) -> str:
        """``right``, ``accused``, ``missed``, ``open`` or ``broke``."""
        if self.verdict in ("not proven", "broke"):
            return "open" if self.verdict == "not proven" else "broke"
        if self.case.truth == "correct":
            return "right" if self.verdict == "equal" else "accused"
        return "missed" if self.verdict == "equal" else "right"


# --- in the ranks --------------------------------------------------------------------------------------------------------


def take(several: Sequence[Case], verbose: bool = False) -> list[Outcome]:
    """Verify all cases in these ranks; return what came of them, on rank 0."""
    from harness.errors import HarnessError
    from harness.rank.context import current
    from harness.train import join

    seat = join(current(), several[0].train)
    outcomes = []
    for case in several:
        begin = time.monotonic()
        try:
            verdict, detail = _verdict(case)
        except HarnessError as error:
            # Other ranks may wait for this one: they are ended, and each case gets ranks of its own.
            raise RuntimeError(f"{REFUSED}: {type(error).__name__}: {error}") from error
        outcomes.append(Outcome(case, verdict, detail, time.monotonic() - begin))
        if seat.rank == 0 and verbose:
            print(_line(outcomes[-1]), file=sys.stderr, flush=True)
    return outcomes if seat.rank == 0 else []


def _verdict(case: Case) -> tuple[str, str]:
    from harness.compare.correctness.verdict import judge
    from harness.rank.context import current
    from harness.train import join, prepare
    from harness.training.recipe import make_recipe
    from harness.verify.faults.inject import trainers
    from harness.verify.subject import Subject
    from harness.verify.verification import evidence_of

    rank, plan = current(), case.train
    seat = join(rank, plan)
    recipe = make_recipe(plan.recipe)
    dataset = prepare(recipe, seat, rank.who.local_rank, plan.seed)
    evidence = evidence_of(Subject(plan, trainers(recipe, dataset, seat), seat, rank.run), case.nprocs)
    if evidence is None:
        return "", ""
    verdict = judge(evidence)
    if verdict.failed is not None:
        return "red", verdict.failed.sentence()
    if verdict.is_proof:
        return "equal", ""
    open_ones = [f"{check.name}: {check.detail}" for check in verdict.checks if check.status == "not checked"]
    return "not proven", "; ".join(open_ones)


# --- the page ------------------------------------------------------------------------------------------------------------


def page(outcomes: Sequence[Outcome]) -> str:
    """Return docs/zoo.md."""
    lines = ["| recipe | truth | what is special | verdict | first red check, or the reason | seconds |", "| --- " * 6 + "|"]
    for outcome in outcomes:
        case, detail = outcome.case, " ".join(outcome.detail.split()).replace("|", "/")
        mark = "" if outcome.sort == "right" else f" **{outcome.sort}**"
        detail = detail if len(detail) <= 160 else f"{detail[:157]}..."
        cells = [case.label, case.truth, case.sort, outcome.verdict + mark, detail, f"{outcome.seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return PAGE + "\n".join([*_summary(outcomes), "", *lines, ""])


def _summary(outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for truth, bad in (("correct", "accused"), ("wrong", "missed")):
        some = [outcome for outcome in outcomes if outcome.case.truth == truth]
        wrong, left, broken = (sum(outcome.sort == sort for outcome in some) for sort in (bad, "open", "broke"))
        lines.append(f"- {len(some)} {truth} ones: {wrong} {bad}, {left} not proven, {broken} ended in an error.")
    return lines


def _line(outcome: Outcome) -> str:
    said = " ".join(outcome.detail.split())[:300]
    return f"{outcome.sort:8}{outcome.case.truth:8} {outcome.case.label}: {outcome.verdict} {said} ({outcome.seconds:.1f} s)"


def holds(outcomes: Sequence[Outcome]) -> bool:
    """Return True where nothing was accused or missed, and few were left open: 1 in 20 correct ones, 1 in 10 wrong ones."""
    sorts: list[tuple[str, str]] = [(outcome.case.truth, outcome.sort) for outcome in outcomes]
    left = all(
        sorts.count((truth, "open")) * share <= sum(t == truth for t, _ in sorts)
        for truth, share in (("correct", 20), ("wrong", 10))
    )
    return left and not any(sort in ("accused", "missed", "broke") for _, sort in sorts)


# --- the command ---------------------------------------------------------------------------------------------------------


def taken(several: Sequence[Case], verbose: bool) -> list[Outcome]:
    """Return what came of cases, from few processes where that works."""
    try:
        return spawn(
            take, (several, verbose), nprocs=several[0].nprocs, backend="gloo", threads=1, timeout_s=NOTHING_FOR_S
        ).return_values()[0]
    except Exception as error:
        if len(several) > 1:
            return [outcome for case in several for outcome in taken([case], verbose)]
        outcome = Outcome(several[0], "refused" if REFUSED in str(error) else "broke", str(error), 0.0)
        if verbose:
            print(_line(outcome), file=sys.stderr, flush=True)
        return [outcome]


def main() -> int:
    """Take all cases, write the page, and return 1 where the criteria do not hold."""
    asked = _parser().parse_args()
    wanted = [case for case in cases() if asked.only.lower() in case.label.lower()]
    outcomes: list[Outcome] = []
    for ranks in sorted({case.nprocs for case in wanted}):
        # The library is imported where it is needed alone.
        for needs in (False, True):
            some = [case for case in wanted if (case.nprocs, case.needs_library) == (ranks, needs)]
            for first in range(0, len(some), AT_A_TIME):
                outcomes += taken(some[first : first + AT_A_TIME], asked.verbose)
    outcomes.sort(key=lambda outcome: wanted.index(outcome.case))
    if asked.stdout:
        print(page(outcomes))
    else:
        asked.page.write_text(page(outcomes), encoding="utf-8")
        print(*_summary(outcomes), *(_line(o) for o in outcomes if o.sort != "right"), sep="\n")
    return int(not holds(outcomes))


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="cases whose name has this in it")
    made.add_argument("--page", type=Path, default=Path(__file__).parents[2] / "docs" / "zoo.md")
    made.add_argument("--stdout", action="store_true", help="print the page instead of writing it")
    made.add_argument("--verbose", action="store_true", help="a line for each case when it is over")
    return made


if __name__ == "__main__":
    sys.exit(main())

"""The audit: faults are injected into these ranks, one after another, and each time the verification is run again.

Whatever is red then was caught; correct runs are verified too, and must not be red. Beside it stands what older rules would
have said, which train one process freely, and compare its losses and parameters with those of the ranks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from harness.compare.correctness.evidence import Evidence
from harness.compare.correctness.verdict import Verdict, judge
from harness.compare.detection import CORRECT, Trial, audit_lines, audit_table
from harness.errors import Mismatch
from harness.rank.context import Rank
from harness.run import faults
from harness.run.faults import FAULTS
from harness.run.folder import write_json
from harness.run.plan import TrainPlan
from harness.run.record import FORMAT
from harness.training.parallel.batchnorm_messages import OneProcess, exchanging
from harness.training.parallel.collectives import from_rank_0
from harness.training.recipe import Recipe
from harness.training.seat import Seat
from harness.training.state import undisturbed_random
from harness.training.trainer import Trainer
from harness.verify.faults.inject import seated, trainers
from harness.verify.faults.seams import DoesNotApply
from harness.verify.plain_training import Alone, train_alone
from harness.verify.subject import Subject
from harness.verify.verification import evidence_of

CORRECT_RUNS = 20
"""Seeds whose correct runs an audit verifies."""


class Trials:
    """Verifies one training again and again, with and without faults; all ranks call the same methods in the same order.

    Args:
        rank: This one.
        recipe: Of the training.
        dataset: Its samples.
        seat: Of this process.

    Attributes:
        verdict: Of the last trial, on rank 0.
    """

    def __init__(self, rank: Rank, recipe: Recipe, dataset: Any, seat: Seat) -> None:
        self._rank = rank
        self._recipe = recipe
        self._dataset = dataset
        self._seat = seat
        self._alone: dict[str, Alone] = {}
        self.verdict: Verdict | None = None

    def take(self, plan: TrainPlan) -> Trial | None:
        """Verify the training of ``plan``, with its fault; return what came of it on rank 0, None elsewhere.

        A fault that the quick checks miss is looked at by the full ones; a correct run has to pass the full ones.

        Raises:
            DoesNotApply: The fault has no place in this training; on all ranks.
        """
        # A fault counts as caught by what runs unasked, if that is enough; a correct run has to stand all that there is.
        full = dataclasses.replace(plan, compare="full")
        # A false alarm of any check counts, and the full tier has all of them.
        if plan.fault is None:
            return self._take(full)[0]
        trial, is_red = self._take(dataclasses.replace(plan, compare="quick"))
        return trial if is_red else self._take(full)[0]

    def _take(self, plan: TrainPlan) -> tuple[Trial | None, bool]:
        made: list[Trainer] = []
        with seated(plan, self._seat) as seat:
            make = trainers(self._recipe, self._dataset, seat)

            def kept(plan: TrainPlan) -> Trainer:
                made.append(make(plan))
                return made[-1]

            evidence = evidence_of(Subject(plan, kept, seat, self._rank.run), self._rank.plan.nprocs)
        # The first trainer took the steps; others were made for the whole batch, and for the second look.
        trial = self._trial(plan, evidence, made[0]) if self._seat.rank == 0 else None
        # Rank 0 alone has a verdict, but all ranks have to agree on whether there is a second trial.
        return trial, bool(from_rank_0(trial is not None and trial.fired is not None))

    def _trial(self, plan: TrainPlan, evidence: Evidence | None, trainer: Trainer) -> Trial:
        assert evidence is not None
        self.verdict = verdict = judge(evidence)
        alone = self._one_process(plan, len(evidence["steps"]))
        losses = [step["loss"]["reported"] for step in evidence["steps"]]
        return Trial(
            fault=plan.fault or CORRECT,
            expected=FAULTS[plan.fault].checks if plan.fault else (),
            fired=verdict.failed.name if verdict.failed else None,
            loss_error=max(_relative(loss, plain) for loss, plain in zip(losses, alone.losses, strict=True)),
            parameters_close=_are_close(dict(trainer.model.named_parameters()), alone.parameters),
            checks={check.name: check.status for check in verdict.checks},
        )

    def _one_process(self, plan: TrainPlan, steps: int) -> Alone:
        """Return the free run of the same settings, made once."""
        # A fault changes nothing for one process alone, and there are dozens of trials of one seed.
        # A fault does not reach the free run: all trials of one seed share it.
        key = repr((dataclasses.replace(plan, fault=None, fault_size=None, compare="off"), steps))
        if key not in self._alone:
            # Rank 0 is alone here: layers that asked the group would wait for ranks that are elsewhere.
            with undisturbed_random(), exchanging(OneProcess()):
                self._alone[key] = train_alone(plan, self._dataset, self._seat.device, steps)
        return self._alone[key]


def audit(rank: Rank, trials: Trials, seat: Seat) -> None:
    """Inject every fault that applies, verify correct runs of other seeds, and write down and show what they came to.

    Raises:
        Mismatch: A fault was missed by checks that ran, or a correct run was accused, and the plan is to stop then.
    """
    plan = rank.plan.train
    assert plan is not None
    taken, left_out = _faulty(rank, plan, trials, seat.world_size)
    for number in range(1, CORRECT_RUNS + 1):
        taken.append(trials.take(dataclasses.replace(plan, seed=plan.seed + number)))
        _tell(rank, len(FAULTS) + number, CORRECT, taken[-1])
    trials_taken = [trial for trial in taken if trial is not None]
    data = {"format": FORMAT, "trials": [dataclasses.asdict(trial) for trial in trials_taken], "left_out": left_out}
    wrong = [f"{row.fault}: {row.sentence()}" for row in audit_table(trials_taken) if not (row.is_right or row.unchecked)]
    if seat.rank == 0:
        # Before anything is raised: the table is worth most when it is red.
        write_json(rank.run.audit, data)
        rank.record.log("INFO", "\n".join(["What the checks catch:", *audit_lines(data)]))
    sentences = from_rank_0("; ".join(wrong))
    if sentences and plan.on_mismatch == "stop":
        raise Mismatch(f"The checks are wrong about this training. {sentences}.", is_consequence=seat.rank != 0)


def _faulty(rank: Rank, plan: TrainPlan, trials: Trials, nprocs: int) -> tuple[list[Trial | None], dict[str, str]]:
    """Return a trial of each fault that applies, and fault -> why another does not."""
    taken: list[Trial | None] = []
    left_out: dict[str, str] = {}
    for number, name in enumerate(FAULTS, start=1):
        faulty = dataclasses.replace(plan, fault=name, compare="full")
        # What the plan alone tells comes first; the injection itself knows what the recipe lacks.
        reasons = faults.problems(faulty, nprocs)
        try:
            if not reasons:
                taken.append(trials.take(faulty))
        except DoesNotApply as error:
            reasons = [str(error)]
        if reasons:
            left_out[name] = reasons[0]
        _tell(rank, number, name, None if reasons else taken[-1])
    return taken, left_out


def _tell(rank: Rank, number: int, fault: str, trial: Trial | None) -> None:
    """Record that a trial is over: whoever waits for an audit wants to see it work."""
    fired = trial.fired if trial is not None else None
    rank.record.event("trial", number=number, total=len(FAULTS) + CORRECT_RUNS, fault=fault, fired=fired, ran=trial is not None)


def _relative(loss: float, plain: float) -> float:
    if not (math.isfinite(loss) and math.isfinite(plain)):
        return math.nan
    return abs(loss - plain) / max(abs(plain), 1e-300)


def _are_close(parameters: dict[str, Tensor], plain: dict[str, Tensor]) -> bool:
    try:
        torch.testing.assert_close({name: p.detach() for name, p in parameters.items()}, plain)
    except AssertionError:
        return False
    return True

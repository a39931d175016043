"""The verification: the ranks take a few steps and capture them, rank 0 replays them alone and writes the evidence down.

It runs in the ranks of the job, before the training, so that a rank started by hand is verified too and nobody waits for a
parent. What it leaves is judged by :mod:`harness.compare`, here and whenever somebody asks again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from harness.compare.correctness.evidence import Evidence, Schedule
from harness.rank.context import Rank
from harness.run.folder import write_json
from harness.run.record import FORMAT
from harness.training.digest import Digests, state_digests
from harness.training.parallel.batchnorm import SyncBatchNorm
from harness.training.parallel.collectives import from_all, from_rank_0
from harness.training.recipe import learning_rates
from harness.training.seat import Seat
from harness.training.state import undisturbed_random
from harness.training.trainer import Trainer
from harness.verify.evaluation_evidence import EvaluationEvidence, evaluation_of
from harness.verify.pending_reference import PendingReference
from harness.verify.shared_evidence import SharedEvidence
from harness.verify.start_evidence import Start, start_of
from harness.verify.step_evidence import Steps, take_steps
from harness.verify.subject import MakeTrainer, Subject
from harness.verify.whole_batch import WholeBatches, compare_whole_batches

SCHEDULED = 1000
"""Of how many steps learning rates are looked at."""

ALL_LEFT_OUT = "every step was left out, because a loss was not finite (on_nonfinite=skip)"


def verify(rank: Rank, make_trainer: MakeTrainer, seat: Seat) -> Evidence | None:
    """Take the steps of the plan's tier with a trainer of their own; return the evidence on rank 0, None elsewhere."""
    plan = rank.plan.train
    assert plan is not None
    evidence = evidence_of(Subject(plan, make_trainer, seat, rank.run), rank.plan.nprocs)
    if evidence is not None:
        write_json(rank.run.evidence, evidence)
    return evidence


@dataclass(frozen=True)
class Findings:
    """What the phases of a verification came to, on rank 0.

    Attributes:
        reference_birth: The reference's state at step 0, and whether it has BatchNorm.
        data_goes_on: The data set has generators of its own, from which the verification has drawn.
        shared_with: Evidence of another run that stands for this one's; empty where it has its own.
    """

    start: Start
    steps: Steps
    evaluation: EvaluationEvidence
    whole: WholeBatches
    twice: list[list[Digests]] | None
    schedule: Schedule | None
    reference_birth: tuple[Digests, bool]
    data_goes_on: bool
    shared_with: str


def evidence_of(subject: Subject, asked_world_size: int) -> Evidence | None:
    """Capture, replay, and join what came of it; all ranks do the same in the same order.

    Args:
        subject: What is verified.
        asked_world_size: How many ranks were asked for.
    """
    plan = subject.plan
    # A trainer of its own: training starts anew, as if nobody had looked.
    trainer = subject.make_trainer(plan)
    start = start_of(trainer)
    # Rank 0 alone has a reference that this may spare.
    shared = SharedEvidence.read(plan.reference if subject.is_rank_0 else None)
    pending = PendingReference(subject, start, trainer.model)
    steps = take_steps(trainer, subject, pending, shared)
    evaluation = evaluation_of(trainer, subject, pending, shared)
    # On all ranks: whether the shared evidence stands for all of this run's.
    # Rank 0 alone reads the file and makes the reference, and all must go the same way: what follows is collective.
    shares = bool(from_rank_0(shared.has_birth(start.birth) and not pending.is_made and bool(steps.checked)))
    whole = _shared_whole(subject, shared) if shares else compare_whole_batches(subject, pending, steps.taken)
    twice = None if plan.compare == "quick" else _without_capture(subject, steps)
    # Before the other ranks leave: it is collective.
    rates = _learning_rates(trainer)
    if not subject.is_rank_0:
        return None
    schedule = shared.schedule if shares else _schedule(rates, pending)
    birth = shared.reference_birth if shared.has_birth(start.birth) else _birth(pending)
    # Workers draw in copies of the data set, but the whole batch is read here.
    data_goes_on = steps.draws_data and (plan.num_workers == 0 or start.draws_by_itself)
    if data_goes_on:
        # It does not come to the same samples again.
        twice = None
    goes_on = shared.data_goes_on if shares else data_goes_on
    shared_with = str(plan.reference) if shares else ""
    findings = Findings(start, steps, evaluation, whole, twice, schedule, birth, goes_on, shared_with)
    evidence = _joined(subject, trainer.model, asked_world_size, findings)
    if not steps.taken:
        evidence["no_steps"] = ALL_LEFT_OUT
    return evidence


def _joined(subject: Subject, model: nn.Module, asked_world_size: int, findings: Findings) -> Evidence:
    plan, start, evaluation, whole = subject.plan, findings.start, findings.evaluation, findings.whole
    reference_birth, has_batch_norm = findings.reference_birth
    return Evidence(
        format=FORMAT,
        tier=plan.compare,
        nprocs=subject.seat.world_size,
        precision=plan.precision,
        deterministic=plan.deterministic,
        sync_bn=plan.sync_bn,
        has_batch_norm=has_batch_norm,
        batch_norm_buffers=buffers_of(model, _NormBase),
        synchronised=buffers_of(model, SyncBatchNorm),
        data_goes_on=findings.data_goes_on,
        uses_random=findings.steps.uses_random,
        find_unused_parameters=plan.ddp.find_unused_parameters or plan.ddp.static_graph,
        schedule=findings.schedule,
        comm_hook=plan.ddp.comm_hook,
        asked_world_size=asked_world_size,
        shared_with=findings.shared_with,
        facts=start.facts,
        uncovered=start.uncovered,
        partition=start.partition,
        readings=start.readings,
        birth=start.birth,
        reference_birth=reference_birth,
        steps=findings.steps.evidence,
        float64=whole.float64,
        own_precision=whole.own_precision,
        not_mathematics=whole.why_not,
        evaluation=evaluation.reported,
        reference_evaluation=evaluation.reference,
        evaluated_again=evaluation.again,
        observed_twice=findings.twice,
    )


def _shared_whole(subject: Subject, shared: SharedEvidence) -> WholeBatches:
    return WholeBatches(*shared.mathematics) if subject.is_rank_0 else WholeBatches(None, None, "")


def _birth(pending: PendingReference) -> tuple[Digests, bool]:
    """Return the reference's state at step 0, and whether it has BatchNorm."""
    with undisturbed_random():
        reference = pending.get()
    return reference.process.birth, bool(reference.batch_norms)


def _without_capture(subject: Subject, steps: Steps) -> list[list[Digests]] | None:
    """Take the same steps again with nobody watching; return both states after each, on rank 0 (R13)."""
    trainer = subject.make_trainer(subject.plan)
    pairs = []
    to_come = trainer.steps()
    # Steps that were left out are taken again too, but have no evidence to stand beside.
    by_number = {step["step"]: step for step in steps.evidence}
    for number in range(steps.taken[-1].number + 1 if steps.taken else 0):
        # No capture: the same training with nobody looking on.
        trainer.step(*next(to_come))
        if number in by_number:
            pairs.append([by_number[number]["after"][0], state_digests(trainer.model, trainer.optimizer)])
    return pairs if subject.is_rank_0 else None


def _learning_rates(trainer: Trainer) -> list[list[list[float]]]:
    """Return the learning rates to come of each parameter group, of each step on each rank; collective."""
    # A copy: scheduler() may leave something in the recipe, which the training is to find as it was.
    number = min(trainer.num_steps, SCHEDULED)
    return from_all(learning_rates(copy.copy(trainer.recipe), trainer.model, trainer.num_steps, number))


def _schedule(of_ranks: list[list[list[float]]], pending: PendingReference) -> Schedule:
    """Compare all learning rates to come, which steps alone do not show, with those that one process declares (R5)."""
    number = len(of_ranks[0])
    with undisturbed_random():
        declared = pending.get().process.learning_rates(number)
    for step, rates in enumerate(zip(*of_ranks, strict=True)):
        for rank, lr in enumerate(rates):
            # As texts, which are equal for NaN too, and tell every bit of a float.
            if repr(lr) != repr(declared[step]):
                return Schedule(steps=number, step=step, rank=rank, lr=lr, declared=declared[step])
    return Schedule(steps=number)


def buffers_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the names of the buffers of all layers of one kind."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kind)]
    return [f"{path}.{key}" if path else key for path, layer in layers for key, _ in layer.named_buffers(recurse=False)]

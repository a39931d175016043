"""Evidence of the evaluation: what the ranks report together, and what one process comes to (R9)."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.data import Subset

from harness.errors import Mismatch
from harness.training.evaluate import eval_dataset_of, evaluate
from harness.training.partition import evaluated, parts_of
from harness.training.state import TrainingState, undisturbed_random
from harness.training.trainer import Trainer
from harness.verify.pending_reference import PendingReference
from harness.verify.reference.evaluation import Metrics
from harness.verify.shared_evidence import SharedEvidence
from harness.verify.subject import Subject

DRAWS = 17
"""With how many draws to evaluate what draws at random, if it differs: counts often come to the same with two."""


@dataclass(frozen=True)
class EvaluationEvidence:
    """An evaluation of the ranks, and of one process.

    Attributes:
        reported: By the ranks; None where there is no evaluation.
        reference: Of one process.
        again: Of one process with other random draws, where the two differ and it draws.
    """

    reported: Metrics | None = None
    reference: Metrics | None = None
    again: list[Metrics] | None = None


def evaluation_of(
    trainer: Trainer, subject: Subject, reference: PendingReference, shared: SharedEvidence
) -> EvaluationEvidence:
    """Return what the ranks report and, on rank 0, what one process comes to; collective.

    Raises:
        Mismatch: One process has another number of samples to evaluate on.
    """
    dataset = eval_dataset_of(trainer.recipe)
    if dataset is None:
        return EvaluationEvidence()
    number = evaluated(len(dataset), subject.plan.global_batch_size, subject.seat.world_size)
    # Lists, as JSON returns them: what is shared is compared with it.
    reported = {name: list(pair) for name, pair in evaluate(trainer, Subset(dataset, range(number))).items()}
    if not subject.is_rank_0:
        return EvaluationEvidence()
    # A reference that the steps have asked for says that they have no twin: then the evaluation is this run's own too.
    known = None if reference.is_made else shared.evaluation(reported)
    if known is not None:
        return EvaluationEvidence(reported, *known)
    with undisturbed_random():
        return _alone(trainer, subject, reference, reported, (number, len(dataset)))


def _alone(
    trainer: Trainer, subject: Subject, pending: PendingReference, reported: Metrics, numbers: tuple[int, int]
) -> EvaluationEvidence:
    """Return the evaluation of one process of the first so many samples, of all that there are, beside the ranks' own."""
    number, of_ranks = numbers
    ranks = subject.seat.world_size
    # As the ranks' evaluation found it.
    state = TrainingState.of(trainer.model, trainer.optimizer)
    parts, size = parts_of(number, ranks), -(-subject.plan.global_batch_size // ranks)
    reference = pending.get().evaluation
    alone = reference.num_samples()
    # Only the first samples are evaluated: data sets of different lengths may have the same ones.
    if alone != of_ranks:
        raise Mismatch(f"eval_dataset() has {alone} samples for one process, and {of_ranks} for {ranks} ranks.")
    metrics, draws = reference.evaluate(state, parts, size, draw=0)
    # What changes with the same draws too is carried from one evaluation to the next: a fault, and no chance.
    if metrics == reported or not draws or reference.evaluate(state, parts, size, draw=0)[0] != metrics:
        return EvaluationEvidence(reported, metrics)
    again = [reference.evaluate(state, parts, size, draw)[0] for draw in range(1, DRAWS)]
    return EvaluationEvidence(reported, metrics, again)

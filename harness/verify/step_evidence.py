"""Evidence of single steps: the ranks take and capture them, and rank 0 does each again alone (R3-R6, R9, R11, R14)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.compare.correctness.bounds import MOST_IN_REPORT
from harness.compare.correctness.evidence import StepEvidence
from harness.run.plan import TrainPlan
from harness.run.record import ratio
from harness.training.digest import Digests, digests, gradient_digest
from harness.training.parallel.comm_hooks import WIRE
from harness.training.state import TrainingState, undisturbed_random
from harness.training.trainer import Trainer
from harness.verify.capture import Capture, Captured
from harness.verify.pending_reference import PendingReference
from harness.verify.reference.data import Replayed, Shard, Unrepeatable
from harness.verify.reference.reference import Reference
from harness.verify.rounding import Gradients, excess_ratios, exchange_ratios, reduction_ratios, round_off
from harness.verify.shared_evidence import SharedEvidence
from harness.verify.subject import Subject

STEPS = {"quick": 3, "full": 5, "audit": 5}
"""How many steps each tier looks at."""

COMPILED = "compile=true: the ranks run other kernels than the reference, which is not compiled"


@dataclass(frozen=True)
class TakenStep:
    """A step that the ranks have taken: its number, the state before it, and its global batch."""

    number: int
    state: TrainingState
    batch: Sequence[int]


@dataclass(frozen=True)
class CheckedStep:
    """What one step came to.

    Attributes:
        evidence: Of it.
        uses_random: Forward drew random numbers.
        draws_data: Reading its samples again comes to others, so that the ranks' own went into the replay.
    """

    evidence: StepEvidence
    uses_random: bool
    draws_data: bool


@dataclass(frozen=True)
class Steps:
    """The steps of a verification: taken on every rank, checked on rank 0."""

    taken: list[TakenStep]
    checked: list[CheckedStep]

    @property
    def evidence(self) -> list[StepEvidence]:
        """What each step came to."""
        return [step.evidence for step in self.checked]

    @property
    def uses_random(self) -> bool:
        """Whether any forward drew random numbers."""
        return any(step.uses_random for step in self.checked)

    @property
    def draws_data(self) -> bool:
        """Whether the data set draws random numbers that cannot be drawn again."""
        return any(step.draws_data for step in self.checked)


def take_steps(trainer: Trainer, subject: Subject, reference: PendingReference, shared: SharedEvidence) -> Steps:
    """Return as many steps as the plan's tier asks for, taken by the ranks and checked on rank 0; collective."""
    capture, check = Capture(trainer), StepCheck(subject.plan, reference, shared)
    steps = Steps([], [])
    for number in range(trainer.num_steps):
        if len(steps.taken) == STEPS[subject.plan.compare]:
            break
        captured, state = capture.take()
        if captured.skipped:
            # on_nonfinite=skip: nothing was learnt from this batch, on any rank.
            continue
        steps.taken.append(TakenStep(number, state, captured.ids))
        # After each step and not at the end: rank 0 never holds more captures than those of one step.
        ranks = subject.exchange(captured)
        if subject.is_rank_0:
            # The other ranks draw nothing meanwhile: a replay must not shift rank 0's stream against theirs.
            with undisturbed_random():
                steps.checked.append(check.checked(steps.taken[-1], len(steps.checked), ranks))
        subject.meet()
    capture.close()
    return steps


class StepCheck:
    """Holds captured steps against the reference.

    Args:
        plan: Of the run.
        reference: Which does them again.
        shared: Evidence that may stand for a step.
    """

    def __init__(self, plan: TrainPlan, reference: PendingReference, shared: SharedEvidence) -> None:
        self._plan = plan
        self._reference = reference
        self._shared = shared

    def checked(self, taken: TakenStep, scheduled: int, ranks: list[Captured]) -> CheckedStep:
        """Return what a step came to, before which the scheduler has gone on ``scheduled`` times."""
        step, state, first = captured_step(taken.number, ranks), taken.state, ranks[0]
        twin = self._shared.step(step)
        # The same bits went in, so the same would come out: a replay costs about what the step did.
        if twin is not None:
            return CheckedStep(twin, self._shared.uses_random, draws_data=False)
        reference = self._reference.get()
        # By the steps that counted: one that was left out moved no scheduler.
        reference.update.go_on_to(scheduled)
        shards, draws_data = _shards(ranks, reference)
        replayed, why_not = self._replay(shards, state, reference)
        # Before the step is taken, as the ranks' own rates were captured.
        step["declared_lr"] = reference.update.declared_lr()
        moved: list[str] = []
        try:
            rewritten = replayed[0].rewritten if replayed else {}
            step["replayed_after"], moved = reference.update.step(state, rewritten, first.reduced, _items(ranks), first.after)
        except Unrepeatable as error:
            # The first reason stands: without a replay the update may fail for the same one.
            why_not = why_not or str(error)
        if replayed:
            _put_replay(step, ranks, replayed)
            step["replayed_batches"] = None if draws_data else [r.batch for r in replayed]
            step["local_excess"] = self._local_excess(ranks, shards, replayed, state, reference)
        step["not_replayed"] = why_not
        step["reduction_ratio"] = reduction_ratios([r.local for r in ranks], first.reduced, WIRE.get(self._plan.ddp.comm_hook))
        step["movement"] = _movement(first, state, moved)
        return CheckedStep(step, any(r.drew_random for r in replayed), draws_data)

    def _replay(self, shards: list[Shard], state: TrainingState, reference: Reference) -> tuple[list[Replayed], str]:
        """Return what each shard comes to alone; none, and why, where one process cannot do it."""
        # Fused kernels round otherwise, and a replay by the same compiler would repeat its mistakes.
        if self._plan.compile:
            return [], COMPILED
        if reference.replay.why_not:
            return [], reference.replay.why_not
        try:
            return [reference.replay.shard(state, shard) for shard in shards], ""
        except Unrepeatable as error:
            return [], str(error)

    def _local_excess(
        self,
        ranks: list[Captured],
        shards: list[Shard],
        replayed: list[Replayed],
        state: TrainingState,
        reference: Reference,
    ) -> float | None:
        """Return the worst excess ratio X of gradients whose bits are not the replay's, where kernels may differ.

        None where none differ, and where float64 cannot do the same again: a random mask or what other ranks told.
        """
        ratios: list[float] = []
        for captured, shard, replay in zip(ranks, shards, replayed, strict=True):
            # Where kernels are deterministic, other bits are a fault, and nothing excuses them.
            if self._plan.deterministic or _gradient_digests(captured.local) == _as_captured(replay, captured):
                continue
            if replay.drew_random or replay.exchanged or self._plan.precision == "float64":
                return None
            # Only where bits differ, because a replay in float64 takes as long as the step again.
            exact = reference.replay.exact_shard(state, shard)
            u = round_off(self._plan.precision, captured.local)
            ratios += excess_ratios(captured.local, replay.gradients, exact, u).values()
        return max(ratios, default=None)


def captured_step(number: int, ranks: list[Captured]) -> StepEvidence:
    """Return what the ranks captured of a step; what the reference says of it is not there yet."""
    return StepEvidence(
        step=number,
        lr=[r.lr for r in ranks],
        declared_lr=[],
        rng=[r.rng for r in ranks],
        device_rng=[r.device_rng for r in ranks],
        batches=[r.batch for r in ranks],
        replayed_batches=None,
        before=[r.before for r in ranks],
        activations=[r.activations for r in ranks],
        replayed_activations=None,
        losses=[r.losses for r in ranks],
        replayed_losses=None,
        local=[_gradient_digests(r.local) for r in ranks],
        replayed_local=None,
        local_excess=None,
        not_replayed="",
        reduced=[r.reduced_digests() for r in ranks],
        reduction_ratio={},
        exchange_ratio={},
        after=[r.after for r in ranks],
        replayed_after=None,
        buffers=[r.buffers for r in ranks],
        replayed_buffers=None,
        movement={},
        loss={
            "ranks": [r.reported for r in ranks],
            "reference": [_sums(r.losses, r.counts, r.counts_items) for r in ranks],
            "reported": ratio(sum(r.reported[0] for r in ranks), sum(r.reported[1] for r in ranks)),
        },
    )


def _put_replay(step: StepEvidence, ranks: list[Captured], replayed: list[Replayed]) -> None:
    """Put beside what the ranks captured what the reference came to."""
    pairs = list(zip(replayed, ranks, strict=True))
    step["replayed_activations"] = [r.activations for r in replayed]
    step["replayed_losses"] = [r.losses for r in replayed]
    step["replayed_local"] = [_as_captured(replay, captured) for replay, captured in pairs]
    step["replayed_buffers"] = [r.buffers for r in replayed]
    step["exchange_ratio"] = exchange_ratios([r.exchanged for r in ranks], [r.exchanged for r in replayed])
    step["loss"]["reference"] = [_sums(replay.losses, captured.counts, captured.counts_items) for replay, captured in pairs]


def _shards(ranks: list[Captured], reference: Reference) -> tuple[list[Shard], bool]:
    """Return what each rank's replay starts from, and whether the data set draws what cannot be drawn again."""
    # From the rank's own generators: its augmentation and dropout are drawn again, not assumed.
    shards = [Shard(r.pieces, len(r.ids), r.random, None, r.exchanged) for r in ranks]
    if all(reference.samples.can_load(shard) for shard in shards):
        return shards, False
    # All or none: a data set that draws in one shard is taken to draw in all.
    return [dataclasses.replace(shard, loaded=r.loaded) for shard, r in zip(shards, ranks, strict=True)], True


def _movement(captured: Captured, state: TrainingState, moved: list[str]) -> dict[str, list[bool]]:
    # By digests, because nothing else was captured of the state after the step.
    before = digests((name, state.model[name]) for name in captured.reduced)
    return {
        name: [
            gradient is not None,
            gradient_digest(gradient) not in ("none", "zero"),
            captured.must_move(name, name in moved),
            before[name] != captured.after[name],
            name in moved,
        ]
        for name, gradient in captured.reduced.items()
    }


def _items(ranks: list[Captured]) -> float | None:
    """Return the number of items in a global batch, where losses are sums over them.

    The ranks' own, unless it is wrong: where weights count, its last bits depend on the order of the sum.
    """
    if not ranks[0].counts_items:
        return None
    exact, own = math.fsum(count for rank in ranks for count in rank.counts), ranks[0].num_items
    return own if own is not None and math.isclose(own, exact, rel_tol=MOST_IN_REPORT) else exact


def _gradient_digests(gradients: Gradients) -> Digests:
    return {name: gradient_digest(gradient) for name, gradient in gradients.items()}


def _as_captured(replayed: Replayed, captured: Captured) -> Digests:
    """Return the digests of replayed gradients; a rank without a sample may take part with zeros where there is no gradient."""
    alone, own = _gradient_digests(replayed.gradients), _gradient_digests(captured.local)
    if captured.pieces:
        return alone
    return {name: own[name] if digest == "none" and own[name] == "zero" else digest for name, digest in alone.items()}


def _sums(losses: Sequence[float], counts: Sequence[float], counts_items: bool) -> list[float]:
    """Return sum and number of the losses of pieces."""
    if counts_items:
        return [math.fsum(losses), math.fsum(counts)]
    # fsum rounds once, so that the order of the pieces does not count.
    return [math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)), math.fsum(counts)]

"""The verification: the ranks take a few steps and capture them, rank 0 replays them alone and writes the evidence down.

It runs in the ranks of the job, before the training, so that a rank started by hand is verified too and nobody waits for a
parent. What it leaves is judged by :mod:`harness.compare`, here and whenever somebody asks again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from harness.compare.correctness.bounds import MOST_IN_REPORT
from harness.compare.correctness.evidence import Evidence, Mathematics, Partition, Schedule, StepEvidence
from harness.errors import Mismatch
from harness.rank.context import Rank
from harness.run.folder import write_json
from harness.run.plan import TrainPlan
from harness.run.record import FORMAT, ratio
from harness.training.digest import Digests, digests, gradient_digest, state_digests
from harness.training.evaluate import eval_dataset_of, evaluate
from harness.training.loader import epoch_batches
from harness.training.parallel.batchnorm import SyncBatchNorm
from harness.training.parallel.collectives import described_tensors, difference, from_all, from_rank_0
from harness.training.parallel.comm_hooks import WIRE
from harness.training.partition import evaluated, partition_of, parts_of, require_one_data_set
from harness.training.recipe import learning_rates
from harness.training.state import TrainingState, undisturbed_random
from harness.training.trainer import Seat, Trainer
from harness.verify.capture import Capture, Captured
from harness.verify.reference import Reference, Replayed, Shard, Unrepeatable
from harness.verify.rounding import Gradients, excess_ratios, exchange_ratios, reduction_ratios, round_off
from harness.verify.whole_batch import WholeBatch

MakeTrainer = Callable[[TrainPlan], Trainer]
Metrics = dict[str, list[float]]
STEPS = {"quick": 3, "full": 5, "audit": 5}
EPOCHS = 2
"""How many epochs' sample numbers are looked at."""

SCHEDULED = 1000
"""Of how many steps learning rates are looked at."""

DRAWS = 17
"""With how many draws to evaluate what draws at random, if it differs: counts often come to the same with two."""


def verify(rank: Rank, make_trainer: MakeTrainer, seat: Seat) -> Evidence | None:
    """Take the steps of the plan's tier with a trainer of their own; return the evidence on rank 0, None elsewhere."""
    plan = rank.plan.train
    assert plan is not None
    evidence = Verification(rank, plan, make_trainer, seat).run()
    if evidence is not None:
        write_json(rank.run.evidence, evidence)
    return evidence


class Verification:
    """One verification, as each rank goes through it; all ranks call the same methods in the same order."""

    def __init__(self, rank: Rank, plan: TrainPlan, make_trainer: MakeTrainer, seat: Seat) -> None:
        self._rank = rank
        self._plan = plan
        self._make_trainer = make_trainer
        self._seat = seat
        self._shared = read_evidence(plan.reference) if seat.rank == 0 else None
        self._own_reference: Reference | None = None
        self._taken: list[tuple[int, TrainingState, Sequence[int]]] = []
        self._whole_batch = WholeBatch(plan, make_trainer, seat, lambda: self._reference(0), self._taken)
        self._random_data = False

    def run(self) -> Evidence | None:
        """Capture, replay, and join what was found."""
        trainer = self._make_trainer(self._plan)
        self._model = trainer.model
        self._described = described_tensors(trainer.model)
        birth = from_all({**state_digests(trainer.model, trainer.optimizer), **digests(trainer.model.named_buffers())})
        facts = from_all({**trainer.facts(), "uncovered": uncovered(trainer)})
        require_one_data_set([each["num_samples"] for each in facts], self._seat.rank)
        partition = self._partition(trainer)
        self._num_steps = trainer.num_steps
        steps = self._steps(trainer)
        evaluation = self._evaluation(trainer)
        shares = self._shares_all(birth, steps)
        why_not = self._why_no_mathematics(shares)
        own, wide = self._own_and_wide(shares, why_not)
        why_not = why_not or self._whole_batch.why_not
        twice = self._without_capture(steps) if self._plan.compare != "quick" else None
        if self._random_data and self._plan.num_workers == 0:
            # A data set with generators of its own does not come to the same samples again.
            twice = None
        schedule = self._schedule(trainer, shares)
        if self._seat.rank != 0:
            return None
        reference_birth, has_batch_norm = self._born(birth)
        evidence = Evidence(
            format=FORMAT,
            tier=self._plan.compare,
            nprocs=self._seat.world_size,
            precision=self._plan.precision,
            deterministic=self._plan.deterministic,
            sync_bn=self._plan.sync_bn,
            has_batch_norm=has_batch_norm,
            batch_norm_buffers=buffers_of(trainer.model, _NormBase),
            synchronised=buffers_of(trainer.model, SyncBatchNorm),
            data_goes_on=self._data_goes_on(shares),
            uses_random=self._uses_random,
            find_unused_parameters=self._plan.ddp.find_unused_parameters or self._plan.ddp.static_graph,
            schedule=schedule,
            comm_hook=self._plan.ddp.comm_hook,
            asked_world_size=self._rank.plan.nprocs,
            shared_with=str(self._plan.reference) if shares else "",
            facts=facts,
            uncovered=sorted({name for each in facts for name in each["uncovered"]}),
            partition=partition,
            birth=birth,
            reference_birth=reference_birth,
            steps=steps,
            float64=wide,
            own_precision=own,
            not_mathematics=why_not,
            evaluation=evaluation[0] if evaluation else None,
            reference_evaluation=evaluation[1] if evaluation else None,
            evaluated_again=evaluation[2] if evaluation else None,
            observed_twice=twice,
        )
        return evidence

    # --- the reference -----------------------------------------------------------------------------------------------

    def _reference(self, number: int) -> Reference:
        """Return the reference, with its scheduler at step ``number``; made when it is first needed."""
        if self._own_reference is None:
            made = Reference(self._plan, self._seat.world_size, self._seat.device, self._num_steps, self._model)
            alone = described_tensors(made.model)
            if alone != self._described:
                differing = difference(alone, self._described, "one process", "the ranks")
                raise Mismatch(
                    f"model() makes another model for one process than for {self._seat.world_size} ranks: {differing}."
                )
            self._require_same_samples(made)
            self._own_reference = made
            self._scheduled = 0
        while self._scheduled < number:
            self._own_reference.next_step()
            self._scheduled += 1
        return self._own_reference

    def _require_same_samples(self, reference: Reference) -> None:
        """See to it that one process has the samples of the ranks, in the same batches.

        Raises:
            Mismatch: It has not: dataset() or batches() of the recipe asks for the number of ranks.
        """
        ranks = self._seat.world_size
        if reference.num_samples != self._num_samples:
            said = f"dataset() has {reference.num_samples} samples for one process, and {self._num_samples} for {ranks} ranks."
            raise Mismatch(said)
        if any(reference.batches(epoch) != batches for epoch, batches in enumerate(self._grouped)):
            raise Mismatch(f"batches() makes other global batches for one process than for {ranks} ranks.")

    def _born(self, birth: list[Digests]) -> tuple[Digests, bool]:
        """Return the reference's state at step 0, and whether it has BatchNorm."""
        if self._shared is not None and self._shared["birth"] == birth:
            return self._shared["reference_birth"], self._shared["has_batch_norm"]
        with undisturbed_random():
            reference = self._reference(0)
        return reference.birth, bool(reference.batch_norms)

    def _data_goes_on(self, shares: bool) -> bool:
        if shares and self._shared is not None:
            return self._shared.get("data_goes_on", False)
        return self._random_data and self._plan.num_workers == 0

    def _twin(self, step: StepEvidence) -> StepEvidence | None:
        """Return the shared evidence of a step, if the ranks captured the same bits there."""
        known = self._shared["steps"] if self._shared is not None else []
        for one in known:
            if all(one[key] == step[key] for key in CAPTURED) and one["loss"]["ranks"] == step["loss"]["ranks"]:  # type: ignore[literal-required]
                return one
        return None

    def _shares_all(self, birth: list[Digests], steps: list[StepEvidence]) -> bool:
        """Return True, on all ranks, where the shared evidence stands for all of this run's."""
        same = self._shared is not None and self._shared["birth"] == birth and self._own_reference is None and bool(steps)
        return bool(from_rank_0(same))

    # --- the steps ---------------------------------------------------------------------------------------------------

    def _steps(self, trainer: Trainer) -> list[StepEvidence]:
        capture = Capture(trainer)
        self._uses_random = False
        found = []
        for number in range(trainer.num_steps):
            if len(self._taken) == STEPS[self._plan.compare]:
                break
            captured, state = capture.take()
            if captured.skipped:
                # on_nonfinite=skip: nothing was learnt from this batch, on any rank.
                continue
            self._taken.append((number, state, captured.ids))
            ranks = self._exchange(captured)
            if self._seat.rank == 0:
                with undisturbed_random():
                    found.append(self._check(number, ranks, state))
            self._meet()
        capture.close()
        return found

    def _check(self, number: int, ranks: list[Captured], state: TrainingState) -> StepEvidence:
        step = _captured(number, ranks)
        twin = self._twin(step)
        if twin is not None:
            self._uses_random = bool(self._shared and self._shared["uses_random"])
            return twin
        reference = self._reference(len(self._taken) - 1)
        replayed, why_not = self._replay(ranks, state, reference)
        first = ranks[0]
        items = _items(ranks)
        step["declared_lr"] = reference.declared_lr()
        rewritten = replayed[0].rewritten if replayed else {}
        after: Digests | None = None
        moved: list[str] = []
        try:
            after, moved = reference.update(state, rewritten, first.reduced, items, first.after)
        except Unrepeatable as error:
            why_not = why_not or str(error)
        if replayed is not None:
            step["replayed_batches"] = None if self._random_data else [r.batch for r in replayed]
            step["replayed_activations"] = [r.activations for r in replayed]
            step["replayed_losses"] = [r.losses for r in replayed]
            step["replayed_local"] = [_as_captured(r, c) for r, c in zip(replayed, ranks, strict=True)]
            step["local_excess"] = self._local_excess(ranks, replayed, state, reference)
            step["replayed_buffers"] = [r.buffers for r in replayed]
            step["exchange_ratio"] = exchange_ratios([r.exchanged for r in ranks], [r.exchanged for r in replayed])
            step["loss"]["reference"] = [
                _sums(r.losses, c.counts, c.counts_items) for r, c in zip(replayed, ranks, strict=True)
            ]
        step["not_replayed"] = why_not
        step["reduction_ratio"] = reduction_ratios([r.local for r in ranks], first.reduced, WIRE.get(self._plan.ddp.comm_hook))
        step["replayed_after"] = after
        step["movement"] = self._movement(first, state, moved)
        return step

    def _replay(self, ranks: list[Captured], state: TrainingState, reference: Reference) -> tuple[list[Replayed] | None, str]:
        self._random_data = not all(reference.can_load(dataclasses.replace(self._shard(r), loaded=None)) for r in ranks)
        if self._plan.compile:
            return None, "compile=true: the ranks run other kernels than the reference, which is not compiled"
        if reference.why_not_replayed:
            return None, reference.why_not_replayed
        try:
            replayed = [reference.replay(state, self._shard(r)) for r in ranks]
        except Unrepeatable as error:
            return None, str(error)
        self._uses_random = self._uses_random or any(r.drew_random for r in replayed)
        return replayed, ""

    def _shard(self, captured: Captured) -> Shard:
        loaded = captured.loaded if self._random_data else None
        return Shard(captured.pieces, len(captured.ids), captured.random, loaded, captured.exchanged)

    def _local_excess(
        self, ranks: list[Captured], replayed: list[Replayed], state: TrainingState, reference: Reference
    ) -> float | None:
        """Return the worst excess ratio X of gradients whose bits are not the replay's, where kernels may differ.

        None where none differ, and where float64 cannot do the same again: a random mask or what other ranks told.
        """
        found: list[float] = []
        for mine, other in zip(ranks, replayed, strict=True):
            if self._plan.deterministic or _gradient_digests(mine.local) == _as_captured(other, mine):
                continue
            if other.drew_random or other.exchanged or self._plan.precision == "float64":
                return None
            exact = reference.exact_shard(state, self._shard(mine))
            found += excess_ratios(mine.local, other.gradients, exact, round_off(self._plan.precision, mine.local)).values()
        return max(found, default=None)

    @staticmethod
    def _movement(captured: Captured, state: TrainingState, moved: list[str]) -> dict[str, list[bool]]:
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

    def _without_capture(self, steps: list[StepEvidence]) -> list[list[Digests]] | None:
        """Take the same steps again with nobody watching; return both states after each, on rank 0."""
        trainer = self._make_trainer(self._plan)
        pairs = []
        taken = trainer.steps()
        by_number = {step["step"]: step for step in steps}
        for number in range(self._taken[-1][0] + 1 if self._taken else 0):
            trainer.step(*next(taken))
            if number in by_number:
                pairs.append([by_number[number]["after"][0], state_digests(trainer.model, trainer.optimizer)])
        return pairs if self._seat.rank == 0 else None

    # --- which samples -----------------------------------------------------------------------------------------------

    def _partition(self, trainer: Trainer) -> Partition:
        """Look at the sample numbers of whole epochs, as the ranks would take them."""
        epochs = range(min(EPOCHS, trainer.plan.epochs or EPOCHS))
        mine = [[(list(batch), list(trainer.shard(batch))) for batch in trainer.epoch_batches(epoch)] for epoch in epochs]
        everybody = from_all(mine)
        self._num_samples = trainer.num_samples
        self._grouped = self._own_batches(trainer, epochs)
        return partition_of(everybody, trainer.num_samples)

    def _own_batches(self, trainer: Trainer, epochs: Sequence[int]) -> list[list[list[int]]]:
        """Return the global batches of some epochs, where the recipe makes them."""
        plan, recipe = self._plan, trainer.recipe
        if not hasattr(recipe, "batches"):
            return []
        made = (epoch_batches(recipe, trainer.num_samples, plan.global_batch_size, plan.seed, epoch) for epoch in epochs)
        return [[list(batch) for batch in batches] for batches in made]

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluation(self, trainer: Trainer) -> tuple[Metrics, Metrics, list[Metrics] | None] | None:
        """Return what the ranks report, what the reference does, and, where they differ, what it does with other draws."""
        plan, ranks = self._plan, self._seat.world_size
        dataset = eval_dataset_of(trainer.recipe)
        if dataset is None:
            return None
        number = evaluated(len(dataset), plan.global_batch_size, ranks)
        reported = evaluate(trainer, torch.utils.data.Subset(dataset, range(number)))
        if self._seat.rank != 0:
            return None
        mine = {name: list(pair) for name, pair in reported.items()}
        if self._shared is not None and self._own_reference is None and self._shared["evaluation"] == mine:
            return mine, self._shared["reference_evaluation"] or {}, self._shared.get("evaluated_again")
        state = TrainingState.of(trainer.model, trainer.optimizer)
        parts, size = parts_of(number, ranks), -(-plan.global_batch_size // ranks)
        again = None
        with undisturbed_random():
            reference = self._reference(0)
            alone = reference.num_evaluated()
            if alone != len(dataset):
                raise Mismatch(f"eval_dataset() has {alone} samples for one process, and {len(dataset)} for {ranks} ranks.")
            expected = reference.evaluate(state, parts, size, draw=0)
            # What changes with the same draws too is carried from one evaluation to the next: a fault, and no chance.
            if expected != mine and reference.drew_in_evaluation and reference.evaluate(state, parts, size, draw=0) == expected:
                again = [reference.evaluate(state, parts, size, draw) for draw in range(1, DRAWS)]
        return mine, expected, again

    # --- the schedule ------------------------------------------------------------------------------------------------

    def _schedule(self, trainer: Trainer, shares: bool) -> Schedule | None:
        """Compare all learning rates to come, which steps alone do not show, with those that one process declares."""
        number = min(trainer.num_steps, SCHEDULED)
        everybody = from_all(learning_rates(copy.copy(trainer.recipe), trainer.model, trainer.num_steps, number))
        if self._seat.rank != 0:
            return None
        if shares and self._shared is not None:
            return self._shared.get("schedule")
        with undisturbed_random():
            declared = self._reference(0).learning_rates(number)
        for step, rates in enumerate(zip(*everybody, strict=True)):
            for rank, mine in enumerate(rates):
                if repr(mine) != repr(declared[step]):
                    return Schedule(steps=number, step=step, rank=rank, lr=mine, declared=declared[step])
        return Schedule(steps=number)

    # --- mathematics -------------------------------------------------------------------------------------------------

    def _why_no_mathematics(self, shares: bool) -> str:
        hook = self._plan.ddp.comm_hook
        why_not = "" if hook == "none" else f"gradients travel compressed (ddp.comm_hook={hook})"
        if not why_not and self._seat.rank == 0 and not shares:
            with undisturbed_random():
                why_not = self._reference(0).why_not_whole
        elif not why_not and self._shared is not None:
            why_not = self._shared["not_mathematics"]
        return str(from_rank_0(why_not))

    def _own_and_wide(self, shares: bool, why_not: str) -> tuple[list[Mathematics] | None, list[Mathematics] | None]:
        """Return the mathematics in the run's own precision, and in float64; None for what is not run."""
        if shares:
            return (self._shared["own_precision"], self._shared["float64"]) if self._shared is not None else (None, None)
        if why_not:
            return None, None
        is_wide = self._plan.precision == "float64"
        whole = self._whole_batch
        own = None if is_wide else whole.compare(self._plan, None)
        # Where a step is that coarse, its own precision hides too much.
        quick = self._plan.compare == "quick" and self._plan.precision != "bfloat16"
        if whole.why_not or (not is_wide and quick):
            return own, None
        return own, whole.compare(dataclasses.replace(self._plan, precision="float64"), torch.float64)

    # --- between ranks -----------------------------------------------------------------------------------------------

    def _exchange(self, captured: Captured) -> list[Captured]:
        """Return all ranks' captures on rank 0; they come as files, so that no reduction is checked by a reduction."""
        if self._seat.rank != 0:
            torch.save(captured, self._rank.run.capture(self._seat.rank))
        self._meet()
        if self._seat.rank != 0:
            return []
        others = []
        for rank in range(1, self._seat.world_size):
            path = self._rank.run.capture(rank)
            others.append(torch.load(path, map_location=self._seat.device, weights_only=False))
            path.unlink()
        return [captured, *others]

    def _meet(self) -> None:
        if self._seat.world_size > 1:
            dist.barrier()


CAPTURED = ("lr", "rng", "device_rng", "batches", "before", "losses", "local", "reduced", "after", "buffers")
"""What the ranks alone say of a step; where it is the same, so is all that the reference says."""


def _captured(number: int, ranks: list[Captured]) -> StepEvidence:
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


def read_evidence(path: str | None) -> Evidence | None:
    """Return the evidence of an earlier run, as it was read back from JSON."""
    if path is None or not Path(path).exists():
        return None
    found: Evidence = json.loads(Path(path).read_text())
    return found


def _items(ranks: list[Captured]) -> float | None:
    """Return the number of items in a global batch, where losses are sums over them.

    The ranks' own, unless it is wrong: where weights count, its last bits depend on the order of the sum.
    """
    if not ranks[0].counts_items:
        return None
    exact, own = math.fsum(count for rank in ranks for count in rank.counts), ranks[0].num_items
    return own if own is not None and math.isclose(own, exact, rel_tol=MOST_IN_REPORT) else exact


def buffers_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the names of the buffers of all layers of one kind."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kind)]
    return [f"{path}.{key}" if path else key for path, layer in layers for key, _ in layer.named_buffers(recurse=False)]


def uncovered(trainer: Trainer) -> list[str]:
    """Return the names of trainable parameters that the wrapper does not reduce."""
    known = {id(p) for p in trainer.wrapped._known_parameters.values()}
    return [name for name, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in known]


def _gradient_digests(gradients: Gradients) -> Digests:
    return {name: gradient_digest(gradient) for name, gradient in gradients.items()}


def _as_captured(replayed: Replayed, captured: Captured) -> Digests:
    """Return the digests of replayed gradients; a rank without a sample may take part with zeros where there is no gradient."""
    found, own = _gradient_digests(replayed.gradients), _gradient_digests(captured.local)
    if captured.pieces:
        return found
    return {name: own[name] if digest == "none" and own[name] == "zero" else digest for name, digest in found.items()}


def _sums(losses: Sequence[float], counts: Sequence[float], counts_items: bool) -> list[float]:
    """Return sum and number of the losses of pieces."""
    if counts_items:
        return [math.fsum(losses), math.fsum(counts)]
    return [math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)), math.fsum(counts)]

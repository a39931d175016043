"""The verification: the ranks take a few steps and capture them, rank 0 replays them alone and writes the evidence down.

It runs in the ranks of the job, before the training, so that a rank started by hand is verified too and nobody waits for a
parent. What it leaves is judged by :mod:`harness.compare`, here and whenever somebody asks again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from harness.batchnorm import SyncBatchNorm, has_local_statistics, with_fixed_statistics
from harness.capture import Capture, Captured
from harness.compare.bounds import MOST_IN_FLOAT64, MOST_IN_REPORT, MOST_LOSS_ERROR
from harness.compare.evidence import Evidence, Mathematics, Partition, Schedule, StepEvidence
from harness.compress import WIRE
from harness.context import Rank
from harness.digest import Digests, digests, gradient_digest, state_digests
from harness.draws import ConstantDraws
from harness.errors import Mismatch
from harness.evaluate import eval_dataset_of, evaluate
from harness.group import described_tensors, difference
from harness.loader import collate_of, epoch_batches, fetch, load
from harness.partition import evaluated, last_batch, partition_of, parts_of, require_one_data_set
from harness.plan import TrainPlan
from harness.recipe import learning_rates
from harness.record import FORMAT, ratio
from harness.replay import Reference, Replayed, Shard, Unrepeatable
from harness.rounding import Gradients, by_floor, dtype_of, excess_ratios, exchange_ratios, reduction_ratios
from harness.rundir import write_json
from harness.shard import pieces, shard
from harness.state import TrainingState, undisturbed_random, widened
from harness.trainer import Seat, Trainer

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
        self._states: list[TrainingState] = []
        self._batches: list[Sequence[int]] = []
        self._numbers: list[int] = []
        self._not_whole = ""
        self._random_data = False

    def run(self) -> Evidence | None:
        """Capture, replay, and join what was found."""
        trainer = self._make_trainer(self._plan)
        self._model = trainer.model
        self._described = described_tensors(trainer.model)
        birth = self._gather({**state_digests(trainer.model, trainer.optimizer), **digests(trainer.model.named_buffers())})
        facts = self._gather({**trainer.facts(), "uncovered": uncovered(trainer)})
        require_one_data_set([each["num_samples"] for each in facts], self._seat.rank)
        partition = self._partition(trainer)
        self._num_steps = trainer.num_steps
        steps = self._steps(trainer)
        evaluation = self._evaluation(trainer)
        shares = self._shares_all(birth, steps)
        why_not = self._why_no_mathematics(shares)
        own, wide = self._own_and_wide(shares, why_not)
        why_not = why_not or self._not_whole
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
        return bool(self._tell(same))

    # --- the steps ---------------------------------------------------------------------------------------------------

    def _steps(self, trainer: Trainer) -> list[StepEvidence]:
        capture = Capture(trainer)
        self._uses_random = False
        found = []
        for number in range(trainer.num_steps):
            if len(self._states) == STEPS[self._plan.compare]:
                break
            captured, state = capture.take()
            if captured.skipped:
                # on_nonfinite=skip: nothing was learnt from this batch, on any rank.
                continue
            self._states.append(state)
            self._batches.append(captured.ids)
            self._numbers.append(number)
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
        reference = self._reference(len(self._states) - 1)
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
        self._random_data = not reference.can_load(dataclasses.replace(self._shard(ranks[0]), loaded=None))
        if self._plan.compile:
            return None, "compile=true: the ranks run other kernels than the reference, which is not compiled"
        if reference.why_not_alone:
            return None, reference.why_not_alone
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
            found += excess_ratios(mine.local, other.gradients, exact, self._round_off(mine.local)).values()
        return max(found, default=None)

    def _round_off(self, gradients: Gradients) -> float:
        return torch.finfo(torch.bfloat16 if self._plan.precision == "bfloat16" else dtype_of(gradients)).eps / 2

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
        for number in range(self._numbers[-1] + 1 if self._numbers else 0):
            trainer.step(*next(taken))
            if number in by_number:
                pairs.append([by_number[number]["after"][0], state_digests(trainer.model, trainer.optimizer)])
        return pairs if self._seat.rank == 0 else None

    # --- which samples -----------------------------------------------------------------------------------------------

    def _partition(self, trainer: Trainer) -> Partition:
        """Look at the sample numbers of whole epochs, as the ranks would take them."""
        epochs = range(min(EPOCHS, trainer.plan.epochs or EPOCHS))
        mine = [[(list(batch), list(trainer.shard(batch))) for batch in trainer.epoch_batches(epoch)] for epoch in epochs]
        everybody = self._gather(mine)
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
        everybody = self._gather(learning_rates(trainer.recipe, trainer.model, trainer.num_steps, number))
        if self._seat.rank != 0:
            return None
        if shares and self._shared is not None:
            return self._shared.get("schedule")
        with undisturbed_random():
            declared = self._reference(0).learning_rates(number)
        for step, rates in enumerate(zip(*everybody, strict=True)):
            for rank, mine in enumerate(rates):
                if mine != declared[step]:
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
        return str(self._tell(why_not))

    def _own_and_wide(self, shares: bool, why_not: str) -> tuple[list[Mathematics] | None, list[Mathematics] | None]:
        """Return the mathematics in the run's own precision, and in float64; None for what is not run."""
        if shares:
            return (self._shared["own_precision"], self._shared["float64"]) if self._shared is not None else (None, None)
        if why_not:
            return None, None
        is_wide = self._plan.precision == "float64"
        own = None if is_wide else self._mathematics(self._plan, None)
        # Where a step is that coarse, its own precision hides too much.
        quick = self._plan.compare == "quick" and self._plan.precision != "bfloat16"
        if self._not_whole or (not is_wide and quick):
            return own, None
        return own, self._mathematics(dataclasses.replace(self._plan, precision="float64"), torch.float64)

    def _mathematics(self, plan: TrainPlan, dtype: torch.dtype | None) -> list[Mathematics] | None:
        """Compare the ranks' gradient with the whole batch's, nothing being drawn, at the first two states."""
        trainer = self._make_trainer(plan)
        if dtype is not None:
            trainer.loss_module.recipe = widened(trainer.recipe)
        found = []
        taken = list(zip(self._numbers, self._states, self._batches, strict=True))[:2]
        for number, state, batch in [*taken, *((*taken[0][:2], batch) for batch in last_batch(trainer) if taken)]:
            samples = self._same_samples(trainer.dataset, batch)
            # One process first: what it cannot do, no rank is to begin.
            whole = self._on_rank_0(partial(self._whole, state, batch, samples, dtype))
            if self._not_whole:
                return None
            state.restore(trainer.model)
            loss, gradients = self._gradient_of_ranks(trainer, batch, samples)
            found.append(self._on_rank_0(partial(self._compare, number, loss, gradients, whole, dtype)))
            if self._not_whole:
                return None
        return found if self._seat.rank == 0 else None

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Return what work comes to on rank 0, and None elsewhere; where it cannot be done, all ranks learn why."""
        found = None
        if self._seat.rank == 0:
            try:
                with undisturbed_random():
                    found = work()
            except Unrepeatable as error:
                self._not_whole = str(error)
        self._not_whole = str(self._tell(self._not_whole))
        return found

    def _same_samples(self, dataset: Any, batch: Sequence[int]) -> Mapping[int, Any] | None:
        """Return the samples of a batch as rank 0 reads them, on all ranks, where each reading comes to others."""
        if not self._tell(self._seat.rank == 0 and self._reference(0).draws_samples):
            return None
        read = self._on_rank_0(lambda: _sendable(dict(zip(batch, fetch(dataset, batch), strict=True))))
        return dict(self._tell(read) or {})

    def _gradient_of_ranks(
        self, trainer: Trainer, batch: Sequence[int], samples: Mapping[int, Any] | None
    ) -> tuple[float, Gradients]:
        mine = trainer.pieces(batch)
        if samples is None:
            loaded = load(trainer.dataset, mine, trainer.recipe, 0, 0)
        else:
            loaded = (collate_of(trainer.recipe)([samples[number] for number in piece]) for piece in mine)
        trainer.model.train()
        trainer.optimizer.zero_grad(set_to_none=True)
        local = has_local_statistics(trainer.model)
        with ConstantDraws(), with_fixed_statistics(trainer.model) if local else nullcontext():
            total, count = trainer.accumulate(batch, [(len(piece), next(loaded)) for piece in mine])
        trainer.reduced(count)
        sums = self._gather([total, count])
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
        return ratio(sum(s[0] for s in sums), sum(s[1] for s in sums)), gradients

    def _whole(
        self, state: TrainingState, batch: Sequence[int], samples: Mapping[int, Any] | None, dtype: torch.dtype | None
    ) -> Whole:
        ranks, reference = self._seat.world_size, self._reference(0)
        shards = [pieces(shard(batch, rank, ranks), self._plan.grad_accumulation) for rank in range(ranks)]
        reference.given = samples
        exact = reference.whole_batch(state, shards, torch.float64)
        if dtype is not None and reference.narrowed is not None:
            kind = str(reference.narrowed).removeprefix("torch.")
            raise Unrepeatable(f"loss() or the model narrows float64 to {kind} of its own accord")
        single = exact if dtype is not None else reference.whole_batch(state, shards, None)
        narrowed = reference.narrowed
        return Whole(exact, single, narrowed, lambda: reference.losses_in_other_orders(state, shards, dtype))

    def _compare(self, number: int, loss: float, gradients: Gradients, whole: Whole, dtype: torch.dtype | None) -> Mathematics:
        (exact_loss, exact), (single_loss, single) = whole.exact, whole.single
        if self._reference(0).has_local_statistics and not all(map(math.isfinite, (loss, exact_loss, single_loss))):
            raise Unrepeatable("the loss is not finite where BatchNorm takes its running statistics for the batch's")
        u = torch.finfo(dtype).eps / 2 if dtype is not None else self._round_off(gradients)
        if whole.narrowed is not None:
            u = max(u, torch.finfo(whole.narrowed).eps / 2)
        if dtype is not None:
            ratios = {name: by_floor(gradients.get(name), exact[name], exact, 1e-11) for name in exact}
        else:
            ratios = excess_ratios(gradients, single, exact, u)
        scale = max(abs(exact_loss) * u, 1e-300)
        if abs(loss - exact_loss) > scale * (MOST_LOSS_ERROR if dtype is None else MOST_IN_FLOAT64 / u):
            # Of a loss that nearly cancels, or of large numbers of which it is the difference, rounding takes more.
            scale = max(scale, *(abs(other - exact_loss) for other in (single_loss, *whole.in_other_orders())))
        error = abs(loss - exact_loss) / scale
        return Mathematics(step=number, ratios=ratios, loss_error=error)

    # --- between ranks -----------------------------------------------------------------------------------------------

    def _tell(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        values = [value]
        if self._seat.world_size > 1:
            dist.broadcast_object_list(values, 0)
        return values[0]

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        values: list[Any] = [value] * self._seat.world_size
        if self._seat.world_size > 1:
            dist.all_gather_object(values, value)
        return values

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


@dataclass(frozen=True)
class Whole:
    """Loss and gradient of a global batch in one process.

    Attributes:
        exact: In float64.
        single: In the precision of the comparison.
        narrowed: The narrowest type that the recipe itself computes in, if narrower.
        in_other_orders: Returns the loss with the samples in other orders.
    """

    exact: tuple[float, Gradients]
    single: tuple[float, Gradients]
    narrowed: torch.dtype | None
    in_other_orders: Callable[[], list[float]]


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


def _sendable(samples: dict[int, Any]) -> dict[int, Any]:
    """Return samples that can be sent to other ranks.

    Raises:
        Unrepeatable: They cannot.
    """
    try:
        pickle.dumps(samples)
    except Exception as error:
        said = f"the data set draws random numbers, and its samples cannot be sent to other ranks ({type(error).__name__})"
        raise Unrepeatable(said) from error
    return samples


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

"""The steps of a training, one after the other, and what they leave in the record."""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from harness.errors import ConfigError
from harness.rank.context import Rank
from harness.run.metric import is_better
from harness.run.record import Evaluation, Step, ratio
from harness.training import checkpoint
from harness.training.evaluate import eval_dataset_of, evaluate
from harness.training.loss import StepResult
from harness.training.meter import Meter
from harness.training.trainer import Trainer
from harness.training.weights import save_weights

if TYPE_CHECKING:
    from harness.training.profiling import StepProfile

DIGEST_STEPS = 3
"""How many first steps leave digests, beside birth and the end."""


class Loop:
    """Takes the steps, and writes down what they came to."""

    def __init__(self, rank: Rank, trainer: Trainer, meter: Meter) -> None:
        self._rank = rank
        self._meter = meter
        self._trainer = trainer
        self._plan = trainer.plan
        # A run without a step has no loss.
        self._last = StepResult(math.nan, 0)
        self._metrics: dict[str, tuple[float, float]] = {}
        # Before the first step: half an evaluation is refused now, and not when training is over.
        self._eval_dataset = eval_dataset_of(trainer.recipe)
        self._best: float | None = None
        self._profile = self._profiled() if self._plan.profile else None

    def run(self, done: int) -> None:
        """Take all steps from number ``done`` on, evaluate, and leave a last checkpoint if there are any.

        A run that stops before its training's end leaves a checkpoint instead of the evaluation.
        """
        if self._plan.keep_best is not None:
            self._require_metric(self._plan.keep_best)
        self._digest(done)
        self._trainer.strategy.time_every_step()
        # What reads memory that nobody wrote has met NaN in the verification; to fill it in every step takes 1 % (measured).
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # Nothing is loaded until the first next(): starting the workers counts as part of the first step.
        steps = self._trainer.steps(done)
        end = min(self._plan.stop_after or self._trainer.num_steps, self._trainer.num_steps)
        for number in range(done, end):
            self._rank.record.step_now = number
            self._step(number, steps)
            after = number + 1
            last = after == end
            self._mark(after - done, last)
            if self._profile is not None:
                self._profile.after(after - done, last)
            if after <= done + DIGEST_STEPS or last:
                self._digest(after)
            if after == self._trainer.num_steps or (self._plan.eval_every and after % self._plan.eval_every == 0):
                self._evaluate(number)
            if self._plan.checkpoint_every and (last or after % self._plan.checkpoint_every == 0):
                checkpoint.save(self._trainer, self._rank.run.checkpoint, after)
        self._rank.record.step_now = None
        if self._trainer.num_steps == 0:
            self._only_evaluate()
        elif self._plan.save_weights and end == self._trainer.num_steps:
            self._rank.record.facts(weights=self._save_weights(self._rank.run.weights))
        self._rank.record.facts(reduction=self._trainer.strategy.reduction_facts())

    def value(self) -> float:
        """Return the evaluation's loss; without one, the last step's over all ranks."""
        if "loss" in self._metrics:
            return ratio(*self._metrics["loss"])
        # Sum and number apart: the mean of the ranks' means would count an unequal shard as much as another.
        total = torch.tensor([self._last.loss_sum, self._last.count], dtype=torch.float64, device=self._trainer.seat.device)
        if self._trainer.seat.world_size > 1:
            dist.all_reduce(total)
        return ratio(float(total[0]), float(total[1]))

    def _profiled(self) -> StepProfile:
        from harness.training.profiling import StepProfile

        path = self._rank.run.trace(self._rank.who.slot)
        return StepProfile(self._trainer, path, max(1, self._plan.warmup_steps))

    def _part(self, name: str) -> AbstractContextManager[Any]:
        return self._profile.part(name) if self._profile is not None else nullcontext()

    def _step(self, number: int, steps: Any) -> None:
        # Before the step, which moves the scheduler on.
        lr = self._trainer.lr
        waited = self._meter.run_delay_s()
        begin = time.monotonic()
        with self._part(f"step {number}"):
            # Within the step's time: training that waits for its data is that slow.
            with self._part("load"):
                batch, loaded = next(steps)
            last = self._trainer.step(batch, loaded)
        end = time.monotonic()
        delay = None if waited is None else (self._meter.run_delay_s() or 0.0) - waited
        self._last = last
        times = self._trainer.strategy.step_times()
        compute_s, exposed_s = (times.compute_s, times.comm_exposed_s) if times else (None, None)
        samples = sum(size for size, _ in loaded)
        step = Step(number, last.loss_sum, last.count, lr, end - begin, end, last.skipped, delay, compute_s, exposed_s, samples)
        self._rank.record.step(step)

    def _mark(self, taken: int, last: bool) -> None:
        """Mark the ends of the first step, the warm-up and the last step, with what the kernel has counted by then."""
        # The first step is unlike the others, and never counted with them, whatever the warm-up.
        names = [(1, "first step"), (max(1, self._plan.warmup_steps), "warm")]
        for name in [name for number, name in names if number == taken] + ["last step"] * last:
            self._rank.record.mark(name)
            if name != "first step":
                # Counters only mean something between two readings: where the counted steps begin, and where they end.
                self._rank.record.event("meter", name=name, **dataclasses.asdict(self._meter.read()))

    def _digest(self, done: int) -> None:
        self._rank.record.event("digest", done=done, **self._trainer.digests())

    def _evaluate(self, number: int) -> None:
        if self._eval_dataset is not None:
            self._metrics = evaluate(self._trainer, self._eval_dataset)
            self._rank.record.evaluation(Evaluation(number, self._metrics))
            if self._plan.keep_best is not None:
                self._keep_best(self._plan.keep_best, number)

    def _only_evaluate(self) -> None:
        if self._eval_dataset is None:
            raise ConfigError(f"steps=0 only evaluates, and {type(self._trainer.recipe).__name__} has no evaluation.")
        self._evaluate(-1)

    def _require_metric(self, name: str) -> None:
        """See to it, before the first step, that an evaluation has the metric by which to keep the best weights.

        Raises:
            ConfigError: It has not, or there is no evaluation.
        """
        if self._eval_dataset is None:
            raise ConfigError(f"keep_best={name}: {type(self._trainer.recipe).__name__} has no evaluation to tell the best by.")
        # One sample is enough to learn the names, on ranks without one too.
        metrics = evaluate(self._trainer, Subset(self._eval_dataset, range(1)))
        if name not in metrics:
            raise ConfigError(f"keep_best={name}: evaluate() returns {', '.join(metrics)}, and no {name}.")

    def _keep_best(self, name: str, number: int) -> None:
        value = ratio(*self._metrics[name])
        if is_better(name, value, self._best):
            self._best = value
            file = self._save_weights(self._rank.run.best_weights)
            self._rank.record.facts(best={"metric": name, "value": value, "step": number, "file": file})

    def _save_weights(self, path: Path) -> str:
        """Write the model's weights, on rank 0, and return the file's name."""
        return save_weights(self._trainer.strategy.full_state(), path).name if self._trainer.seat.rank == 0 else ""

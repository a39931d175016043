"""One rank's training, start to end: a page."""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.compare.correctness.verdict import judge
from harness.errors import ConfigError, Mismatch
from harness.rank.context import Rank
from harness.rank.group import init_parallel_env
from harness.run.plan import TrainPlan
from harness.run.record import Evaluation, Step, ratio
from harness.training import checkpoint
from harness.training.evaluate import eval_dataset_of, evaluate
from harness.training.meter import Meter
from harness.training.parallel.ddp_timing import reducing, reduction, watch
from harness.training.recipe import Recipe, make_recipe
from harness.training.seeds import derive, seed_everything
from harness.training.trainer import Seat, StepResult, Trainer
from harness.verify.audit import Trials, audit
from harness.verify.faults.inject import seated, trainers
from harness.verify.subject import MakeTrainer
from harness.verify.verification import verify

if TYPE_CHECKING:
    from harness.training.profiling import StepProfile

DIGEST_STEPS = 3
"""How many first steps leave digests, beside birth and the end."""


def train(rank: Rank) -> float:
    """Train the plan's recipe on this rank and return what a sweeper may minimise: the evaluation's loss, or the last step's.

    Raises:
        HarnessError: A setting turned out not to work with this recipe and data.
        NonFinite: A loss was not finite.
    """
    plan = rank.plan.train
    assert plan is not None
    with seated(plan, join(rank, plan)) as seat:
        return _train(rank, plan, seat)


def _train(rank: Rank, plan: TrainPlan, seat: Seat) -> float:
    if plan.resume:
        found = checkpoint.look(Path(rank.plan.cwd, plan.resume), plan, seat.world_size)
        if seat.rank == 0:
            rank.record.log("INFO", found)
    recipe = make_recipe(plan.recipe)
    if hasattr(recipe, "measure"):
        return measure(rank, recipe, seat)
    dataset = prepare(recipe, seat, rank.who.local_rank, plan.seed)
    rank.record.mark("data and model")
    make_trainer = trainers(recipe, dataset, seat)
    if plan.compare != "off":
        check(rank, make_trainer, seat)
        rank.record.mark("verified")
    if plan.compare == "audit":
        audit(rank, Trials(rank, recipe, dataset, seat), seat)
        rank.record.mark("audited")
    trainer = make_trainer(plan)
    rank.record.mark("DDP built")
    rank.record.facts(**trainer.facts())
    with Meter() as meter:
        loop = Loop(rank, trainer, meter)
        loop.run(checkpoint.load(trainer, Path(rank.plan.cwd, plan.resume)) if plan.resume else 0)
        return loop.value()


def join(rank: Rank, plan: TrainPlan) -> Seat:
    """Join the process group and set up torch as the plan says."""
    rank.record.mark("torch imported")
    import torch._dynamo

    rank.record.mark("lazy imports done")
    torch.set_num_threads(rank.plan.threads)
    torch.use_deterministic_algorithms(plan.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    environment = init_parallel_env(rank.plan.backend)
    rank.record.mark("group ready")
    kind = environment.device_type
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, environment.device_id)
    return Seat(environment.rank, environment.world_size, device)


def prepare(recipe: Recipe, seat: Seat, local_rank: int, seed: int) -> Any:
    """Return the recipe's data set, after one rank of each machine has prepared it while the others waited.

    What it draws by the common generators follows from the seed alone, and is the same on every rank.
    """
    ready = getattr(recipe, "prepare", None)
    if ready is not None:
        if local_rank == 0:
            ready()
        if seat.world_size > 1:
            dist.barrier()
    seed_everything(derive(seed, "dataset"))
    return recipe.dataset()


def measure(rank: Rank, recipe: Any, seat: Seat) -> float:
    """Record what a recipe that only measures communication yields: bytes, and seconds; return the last size's time.

    Raises:
        ConfigError: One rank communicates with nobody.
    """
    if seat.world_size == 1:
        raise ConfigError(f"{type(recipe).__name__} measures communication, and one rank has nobody to talk to. Use nprocs=2.")
    found = list(recipe.measure(seat.device))
    rank.record.facts(bandwidth=found)
    return min(found[-1][1])


def check(rank: Rank, make_trainer: MakeTrainer, seat: Seat) -> None:
    """Verify that these ranks train what one process trains.

    Raises:
        Mismatch: They do not, and the plan is to stop then.
    """
    plan = rank.plan.train
    assert plan is not None
    evidence = verify(rank, make_trainer, seat)
    said: list[Any] = ["", False]
    if evidence is not None:
        verdict = judge(evidence)
        said = ["\n".join(verdict.sentences()), verdict.failed is not None]
    if seat.world_size > 1:
        dist.broadcast_object_list(said, 0)
    sentences, is_red = said
    if is_red and plan.on_mismatch == "stop":
        raise Mismatch(sentences, is_consequence=seat.rank != 0)
    if is_red and seat.rank == 0:
        rank.record.log("WARNING", sentences)


class Loop:
    """Takes the steps, and writes down what they came to."""

    def __init__(self, rank: Rank, trainer: Trainer, meter: Meter) -> None:
        self._rank = rank
        self._meter = meter
        self._trainer = trainer
        self._plan = trainer.plan
        self._last = StepResult(math.nan, 0)
        self._metrics: dict[str, tuple[float, float]] = {}
        self._eval_dataset = eval_dataset_of(trainer.recipe)
        self._profile = self._profiled() if self._plan.profile else None

    def run(self, done: int) -> None:
        """Take all steps from number ``done`` on, evaluate, and leave a last checkpoint if there are any.

        A run that stops before its training's end leaves a checkpoint instead of the evaluation.
        """
        self._digest(done)
        watch(self._trainer.wrapped._ddp)
        # What reads memory that nobody wrote has met NaN in the verification; to fill it in every step takes 1 % (measured).
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
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
        self._rank.record.facts(reduction=reduction(self._trainer.wrapped._ddp))

    def value(self) -> float:
        """Return the evaluation's loss; without one, the last step's over all ranks."""
        if "loss" in self._metrics:
            return ratio(*self._metrics["loss"])
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
        lr = self._trainer.lr
        waited = self._meter.run_delay_s()
        begin = time.monotonic()
        with self._part(f"step {number}"):
            with self._part("load"):
                batch, loaded = next(steps)
            last = self._trainer.step(batch, loaded)
        end = time.monotonic()
        delay = None if waited is None else (self._meter.run_delay_s() or 0.0) - waited
        self._last = last
        seen = reducing(self._trainer.wrapped._ddp)
        spent = (seen.compute_s, seen.comm_exposed_s) if seen else (None, None)
        self._rank.record.step(Step(number, last.loss_sum, last.count, lr, end - begin, end, last.skipped, delay, *spent))

    def _mark(self, taken: int, last: bool) -> None:
        """Mark the ends of the first step, the warm-up and the last step, with what the kernel has counted by then."""
        names = [(1, "first step"), (max(1, self._plan.warmup_steps), "warm")]
        for name in [name for number, name in names if number == taken] + ["last step"] * last:
            self._rank.record.mark(name)
            if name != "first step":
                self._rank.record.event("meter", name=name, **dataclasses.asdict(self._meter.read()))

    def _digest(self, done: int) -> None:
        self._rank.record.event("digest", done=done, **self._trainer.digests())

    def _evaluate(self, number: int) -> None:
        if self._eval_dataset is not None:
            self._metrics = evaluate(self._trainer, self._eval_dataset)
            self._rank.record.evaluation(Evaluation(number, self._metrics))

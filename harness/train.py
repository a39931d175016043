"""One rank's training, start to end: a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.compare.correctness.verdict import judge
from harness.errors import ConfigError, Mismatch
from harness.rank.context import Rank
from harness.rank.group import init_parallel_env
from harness.run.plan import TrainPlan
from harness.training import checkpoint
from harness.training.loop import Loop
from harness.training.meter import Meter
from harness.training.recipe import Recipe, make_recipe
from harness.training.seat import Seat
from harness.training.seeds import derive, seed_everything
from harness.verify.audit import Trials, audit
from harness.verify.faults.inject import seated, trainers
from harness.verify.subject import MakeTrainer
from harness.verify.verification import verify


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
    # Before data and model, which may take minutes: a checkpoint that does not fit is refused at once.
    if plan.resume:
        message = checkpoint.look(Path(rank.plan.cwd, plan.resume), plan, seat.world_size)
        if seat.rank == 0:
            rank.record.log("INFO", message)
    recipe = make_recipe(plan.recipe)
    if hasattr(recipe, "measure"):
        return measure(rank, recipe, seat)
    dataset = prepare(recipe, seat, rank.who.local_rank, plan.seed)
    rank.record.mark("data and model")
    make_trainer = trainers(recipe, dataset, seat)
    if plan.compare != "off" and plan.steps != 0:
        check(rank, make_trainer, seat)
        rank.record.mark("verified")
    if plan.compare == "audit" and plan.steps != 0:
        audit(rank, Trials(rank, recipe, dataset, seat), seat)
        rank.record.mark("audited")
    # One of its own: those of the verification have taken steps.
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

    # The first optimizer would import it, within the time of something else.
    import torch._dynamo

    rank.record.mark("lazy imports done")
    torch.set_num_threads(rank.plan.threads)
    # warn_only: an operation without a deterministic kernel is named in a warning, and the training goes on.
    torch.use_deterministic_algorithms(plan.deterministic, warn_only=True)
    # By NaN, and in deterministic runs alone: what a recipe reads before it has written it is found.
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
    # Not before: the rank that has prepared may have drawn numbers that the others have not.
    seed_everything(derive(seed, "dataset"))
    return recipe.dataset()


def measure(rank: Rank, recipe: Any, seat: Seat) -> float:
    """Record what a recipe that only measures communication yields: bytes, and seconds; return the last size's time.

    Raises:
        ConfigError: One rank communicates with nobody.
    """
    if seat.world_size == 1:
        raise ConfigError(f"{type(recipe).__name__} measures communication, and one rank has nobody to talk to. Use nprocs=2.")
    times_of_sizes = list(recipe.measure(seat.device))
    rank.record.facts(bandwidth=times_of_sizes)
    # The least of its times: what disturbs a transfer only ever makes it longer.
    return min(times_of_sizes[-1][1])


def check(rank: Rank, make_trainer: MakeTrainer, seat: Seat) -> None:
    """Verify that these ranks train what one process trains.

    Raises:
        Mismatch: They do not, and the plan is to stop then.
    """
    plan = rank.plan.train
    assert plan is not None
    evidence = verify(rank, make_trainer, seat)
    # Of one length on every rank, as broadcast_object_list() asks.
    answer: list[Any] = ["", False]
    # Only rank 0 has evidence. Every rank hears of the verdict, because all have to stop, or none.
    if evidence is not None:
        verdict = judge(evidence)
        answer = ["\n".join(verdict.sentences()), verdict.failed is not None]
    if seat.world_size > 1:
        dist.broadcast_object_list(answer, 0)
    sentences, is_red = answer
    if is_red and plan.on_mismatch == "stop":
        raise Mismatch(sentences, is_consequence=seat.rank != 0)
    if is_red and seat.rank == 0:
        rank.record.log("WARNING", sentences)

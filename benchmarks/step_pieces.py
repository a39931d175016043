"""What a step of the harness does beside a hand-written DDP loop, and how long each thing takes.

``OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -m benchmarks.step_pieces``, or with ``se_resnext`` behind it: the
other recipe whose samples are images of one size, so that all arms' batches cost the same.

Each arm does what the arm before it does, and one thing more. All train in the same processes, in blocks of steps in random
order, each arm with several models, because where a model lies in memory changes its speed. The first decile of an arm's
steps is compared: what waits for a core has a long tail on one side.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness.compare.performance.stats import quantile
from harness.run.plan import TrainPlan
from harness.run.recorder import Recorder
from harness.training.loop import Loop
from harness.training.loss import LossModule
from harness.training.meter import Meter
from harness.training.parallel.ddp import DataParallel
from harness.training.recipe import Recipe, make_recipe, make_scheduler
from harness.training.seat import Seat
from harness.training.trainer import Trainer

RECIPES = {"mnist": "recipes.mnist.Mnist", "se_resnext": "recipes.se_resnext.SEResNeXt"}
MODELS, ROUNDS, BLOCK, GLOBAL_BATCH = 4, 12, 30, 64
STEPS = 2 * ROUNDS * (BLOCK + 1)
TARGET = RECIPES[sys.argv[1] if len(sys.argv) > 1 else "mnist"]
PLAN = TrainPlan(recipe={"_target_": TARGET}, steps=STEPS, global_batch_size=GLOBAL_BATCH)
CPU = torch.device("cpu")
Step = Callable[[], object]


def by_hand(wrap: Callable[[Recipe, nn.Module], Callable[[Any], Any]]) -> Step:
    """Return the step of a hand-written loop, whose loss is that of ``wrap``."""
    recipe = make_recipe(PLAN.recipe)
    dataset, model = recipe.dataset(), recipe.model()
    loss_of = wrap(recipe, model)
    optimizer = recipe.optimizer(model)
    scheduler = make_scheduler(recipe, optimizer, STEPS)
    assert scheduler is not None
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss.item()

    return step


def plain(recipe: Recipe, model: nn.Module) -> Callable[[Any], Any]:
    """Wrap as anybody would."""
    wrapped = DistributedDataParallel(model)
    return lambda batch: recipe.loss(wrapped, batch)


def alarmed(recipe: Recipe, model: nn.Module) -> Callable[[Any], Any]:
    """Wrap as the trainer does."""
    wrapped = DataParallel(LossModule(recipe, model, PLAN, CPU))
    return lambda batch: wrapped(batch)[0]


def by_trainer(seat: Seat, watched: bool = False) -> tuple[Trainer, Step]:
    """Return a trainer and its step."""
    recipe = make_recipe(PLAN.recipe)
    trainer = Trainer(PLAN, recipe, recipe.dataset(), seat)
    if watched:
        trainer.strategy.time_every_step()
    steps = trainer.steps()
    return trainer, lambda: trainer.step(*next(steps))


def unchecked(step: Step) -> Step:
    """Return the trainer's step without the look at all gradients."""

    def without() -> None:
        with patch("harness.training.trainer.are_finite", lambda values: True):
            step()

    return without


def recorded(seat: Seat, folder: Path, meter: Meter) -> Step:
    """Return the whole step, as a rank of a job takes it."""
    trainer, _ = by_trainer(seat, watched=True)
    rank: Any = SimpleNamespace(record=Recorder(folder / f"rank-{seat.rank}.jsonl"))
    loop, steps, numbers = Loop(rank, trainer, meter), trainer.steps(), itertools.count()
    return lambda: loop._step(next(numbers), steps)


def measured(step: Step, deterministic: bool) -> Iterator[float]:
    """Yield the seconds of a block's steps, after one that is not counted."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    step()
    before = time.monotonic()
    for _ in range(BLOCK):
        step()
        now = time.monotonic()
        yield now - before
        before = now


def main() -> None:
    """Take all arms' steps on this rank; rank 0 prints the table."""
    dist.init_process_group("gloo")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as in training
    seat = Seat(dist.get_rank(), dist.get_world_size(), CPU)
    with tempfile.TemporaryDirectory() as folder, Meter() as meter:
        makers: dict[str, tuple[Callable[[], Step], bool]] = {
            "a hand-written DDP loop": (lambda: by_hand(plain), False),
            "+ the alarm, DataParallel": (lambda: by_hand(alarmed), False),
            "+ loader, weighted backward": (lambda: unchecked(by_trainer(seat)[1]), False),
            "+ the look at all gradients": (lambda: by_trainer(seat)[1], False),
            "+ deterministic=true": (lambda: by_trainer(seat)[1], True),
            "+ DDP's own times": (lambda: by_trainer(seat, watched=True)[1], True),
            "+ the record of the step": (lambda: recorded(seat, Path(folder), meter), True),
        }
        arms = [(name, make(), exact) for name, (make, exact) in makers.items() for _ in range(MODELS)]
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        order = random.Random(0)
        for _ in range(ROUNDS):
            for name, step, exact in order.sample(arms, len(arms)):
                seconds[name] += measured(step, exact)
    if seat.rank == 0:
        print("| what a step does | first decile | more than the line above | ratio to the first line |\n|---|---:|---:|---:|")
        first = before = quantile(seconds["a hand-written DDP loop"], 0.1)
        for name, times in seconds.items():
            low = quantile(times, 0.1)
            print(f"| {name} | {low * 1e3:.2f} ms | {(low - before) * 1e6:.0f} us | {low / first:.3f} |")
            before = low
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

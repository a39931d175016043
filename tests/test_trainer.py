"""The trainer on 2 and 3 ranks against a plain loop over whole batches in one process, which shares seed and order only.

Arithmetic is float64 unless a case says otherwise, so that the order of additions does not hide a mistake.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from harness.errors import ConfigError
from harness.run.plan import Ddp, TrainPlan
from harness.training.batches import Batches
from harness.training.digest import state_digests
from harness.training.loader import epoch_batches, load
from harness.training.loss import NonFinite, loss_and_items
from harness.training.parallel.batchnorm import convert_sync_batchnorm
from harness.training.parallel.gradients import clip_, gradient_values
from harness.training.recipe import make_recipe
from harness.training.seat import Seat
from harness.training.seeds import derive, seed_everything
from harness.training.trainer import Trainer
from tests import toys
from tests.ranks import Outcomes, groups_of

SIZES = (2, 3)
ALONE = Seat(0, 1, torch.device("cpu"))


def trainer(recipe: Any, seat: Seat = ALONE, **settings: Any) -> Trainer:
    plan = TrainPlan(recipe={"_target_": "toys"}, **{"precision": "float64", "steps": 4, "global_batch_size": 6, **settings})
    return Trainer(plan, recipe, recipe.dataset(), seat)


def take_all(made: Trainer) -> dict[str, Any]:
    """Train to the end; return what one process would have, too."""
    losses, counts, skipped, gradients = [], [], [], []
    for batch, loaded in made.steps():
        result = made.step(batch, loaded)
        losses.append(result.loss_sum)
        counts.append(result.count)
        skipped.append(result.skipped)
        gradients.append({name: copied(p.grad) for name, p in made.model.named_parameters()})
    return {
        "losses": losses,
        "counts": counts,
        "skipped": skipped,
        "gradients": gradients,
        "parameters": {name: p.detach().clone() for name, p in made.model.named_parameters()},
        "buffers": {name: b.clone() for name, b in made.model.named_buffers()},
        "lr": made.lr,
    }


def copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def plain(recipe: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Train as anybody would, in one process with whole batches."""
    plan = TrainPlan(recipe={}, **{"precision": "float64", "steps": 4, "global_batch_size": 6, **settings})
    seed_everything(derive(plan.seed, "model"))
    model = recipe.model().to(torch.float32 if plan.precision == "float32" else torch.float64)
    dataset, optimizer = recipe.dataset(), recipe.optimizer(model)
    epochs = [epoch_batches(recipe, len(dataset), plan.global_batch_size, plan.seed, e) for e in range(plan.epochs or 9)]
    batches = [batch for epoch in epochs for batch in epoch][: plan.steps]
    scheduler = None
    if hasattr(recipe, "scheduler"):
        scheduler = recipe.scheduler(optimizer, *([len(batches)] if isinstance(recipe, toys.Scheduled) else []))
    losses, gradients, lr = [], [], 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss = recipe.loss(model, getattr(recipe, "collate", default_collate)([dataset[number] for number in batch]))
        mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        lr = optimizer.param_groups[0]["lr"]
        mean.backward()
        if plan.clip_norm and any(p.grad is not None and p.grad.is_sparse for p in model.parameters()):
            norm = torch.stack([p.grad.to_dense().norm() for p in model.parameters() if p.grad is not None]).norm()
            for p in model.parameters():
                p.grad = p.grad * min(1.0, plan.clip_norm / (float(norm) + 1e-6))
        elif plan.clip_norm:
            clip_grad_norm_(model.parameters(), plan.clip_norm)
        losses.append(float(mean.detach()))
        gradients.append({name: copied(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    lr = optimizer.param_groups[0]["lr"]
    return {"losses": losses, "gradients": gradients, "parameters": dict(model.named_parameters()), "lr": lr}


SCENES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shards of 5 and 4": (toys.Points(18), {"global_batch_size": 9, "steps": 3}),
    "a naive mean gives -200": (toys.Sorted(), {"steps": 1, "global_batch_size": 5}),
    "30 and 3 tokens": (toys.Tokens((30, 3, 30, 3), in_order=True), {"global_batch_size": 2}),
    "one sample": (toys.Points(1), {}),
    "one sequence": (toys.Tokens((4,)), {}),
    "a sample less than ranks": (toys.Points(2), {}),
    "last batch of one": (toys.Points(7), {"steps": None, "epochs": 2}),
    "last batch of one, in pieces": (toys.Points(7), {"steps": None, "epochs": 2, "grad_accumulation": 2}),
    "batches by tokens": (toys.Tokens((5, 9, 31, 40, 2, 7, 16, 3, 22, 12, 38)), {"steps": 12}),
    "batches by tokens, in pieces": (
        toys.Tokens((5, 9, 31, 40, 2, 7, 16, 3, 22, 12, 38)),
        {"steps": 12, "grad_accumulation": 3},
    ),
    "sparse table, ranks without samples": (toys.Tokens((4, 5, 1, 38, 40), table="sparse"), {"steps": 8}),
    "sparse bag, ranks without samples": (toys.Tokens((4, 5, 1, 38, 40), table="bag"), {"steps": 8}),
    "sparse table, in pieces": (toys.Tokens((4, 5, 1, 7, 5, 3), table="sparse"), {"grad_accumulation": 2}),
    "sparse table, clipped": (toys.Tokens((4, 5, 1, 38), table="sparse"), {"clip_norm": 0.05}),
    "pieces": (toys.Points(24), {"grad_accumulation": 4, "global_batch_size": 12}),
    "pieces of unequal shards": (toys.Points(24), {"grad_accumulation": 2, "global_batch_size": 7}),
    "clipped": (toys.Points(18), {"clip_norm": 0.1, "grad_accumulation": 2}),
    "clipped, far below": (toys.Points(18), {"clip_norm": 1e9}),
    "steps across epochs": (toys.Points(10, optimizer="adam"), {"steps": 7, "global_batch_size": 4}),
    "scheduler": (toys.Scheduled(18), {"steps": None, "epochs": 2}),
    "scheduler with its own option": (toys.ScheduledAlone(18), {}),
    "heads by turns": (toys.Branches(9), {"ddp": Ddp(find_unused_parameters=True), "steps": 8, "global_batch_size": 4}),
    "heads by turns, in pieces": (
        toys.Branches(9),
        {"ddp": Ddp(find_unused_parameters=True), "steps": 8, "grad_accumulation": 2},
    ),
    "small buckets of views": (toys.Points(18), {"ddp": Ddp(bucket_cap_mb=1e-4, gradient_as_bucket_view=True)}),
    "views, in pieces, clipped": (
        toys.Points(24),
        {"ddp": Ddp(gradient_as_bucket_view=True), "grad_accumulation": 2, "clip_norm": 0.1},
    ),
    "static graph": (toys.Points(18), {"ddp": Ddp(static_graph=True), "steps": 4}),
    "static graph, in pieces, a sample less": (toys.Points(24), {"ddp": Ddp(static_graph=True), "grad_accumulation": 2}),
    "static graph, ranks without samples": (toys.Points(7), {"ddp": Ddp(static_graph=True), "steps": None, "epochs": 2}),
    "synchronised BatchNorm": (toys.Points(18, batch_norm=True), {"sync_bn": True, "global_batch_size": 9}),
    "float32": (toys.Points(18, dtype="float32"), {"precision": "float32", "global_batch_size": 9}),
}


def scene_case(name: str) -> Any:
    recipe, settings = SCENES[name]
    return lambda seat, folder: take_all(trainer(recipe, seat, **settings))


# --- cases with assertions of their own -------------------------------------------------------------------------------


def stopped(recipe: Any) -> Any:
    def case(seat: Seat, folder: Path) -> dict[str, Any]:
        made = trainer(recipe, seat)
        try:
            take_all(made)
        except NonFinite as error:
            return {"message": str(error), "consequence": error.is_consequence, "digests": made.digests()}
        return {}

    return case


def skipping(recipe: Any, **settings: Any) -> Any:
    def case(seat: Seat, folder: Path) -> dict[str, Any]:
        made = trainer(recipe, seat, on_nonfinite="skip", **settings)
        found = []
        for batch, loaded in made.steps():
            before = state_digests(made.model, made.optimizer), made.lr
            skipped = made.step(batch, loaded).skipped
            moved = before != (state_digests(made.model, made.optimizer), made.lr)
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in made.model.state_dict().values())
            found.append((skipped, moved, finite, bool(recipe.bad & set(batch))))
        return {"steps": found, "digests": made.digests()}

    return case


def streams(seat: Seat, folder: Path) -> dict[str, Any]:
    def masks(seed: int) -> tuple[str, Tensor, list[Any]]:
        made = trainer(toys.Points(12, dropout=0.5), seat, seed=seed)
        born = made.digests()["parameters"]
        return born, nn.functional.dropout(torch.ones(64)), [list(batch) for batch, _ in made.steps()]

    first, again, other = masks(0), masks(0), masks(1)
    return {"first": first, "again": again, "other": other}


def workers(seat: Seat, folder: Path) -> dict[str, Any]:
    def loaded(**settings: Any) -> list[Any]:
        return [[pieces[0][1] for _, pieces in trainer(toys.Noise(12), seat, steps=3, **settings).steps()]][0]

    def trained(num_workers: int) -> str:
        made = trainer(toys.Points(13), seat, num_workers=num_workers, grad_accumulation=2)
        take_all(made)
        return made.digests()["parameters"]

    made = trainer(toys.Noise(12), seat, num_workers=2, steps=3)
    resumed = [pieces[0][1] for _, pieces in made.steps(1)]
    noise = [loaded(num_workers=2), loaded(num_workers=1), loaded(num_workers=2, seed=1)]
    return {"noise": noise, "resumed": resumed, "trained": [trained(0), trained(2)]}


class Synchronised(toys.Points):
    """Has a synchronised layer of its own."""

    def model(self) -> nn.Module:
        return convert_sync_batchnorm(super().model())


def refused_synchronisation(seat: Seat, folder: Path) -> list[str]:
    messages = []
    for recipe, sync_bn in ((toys.Points(7, batch_norm=True), True), (Synchronised(7, batch_norm=True), False)):
        with pytest.raises(ConfigError) as error:
            take_all(trainer(recipe, seat, sync_bn=sync_bn))
        messages.append(str(error.value))
    return messages


def precise(precision: str) -> Any:
    def case(seat: Seat, folder: Path) -> dict[str, Any]:
        made = trainer(toys.Points(18, dtype="float32"), seat, precision=precision)
        kinds: list[str] = []
        made.model[0].register_forward_hook(lambda module, args, output: kinds.append(str(output.dtype)))
        return {**take_all(made), "kinds": kinds, "dtype": made.facts()["dtype"]}

    return case


def alone_on_rank_0(seat: Seat, folder: Path) -> str:
    """Rank 0 uses the model by itself between steps, in training mode too."""
    made = trainer(toys.Points(18, batch_norm=True, dropout=0.5), seat)
    for batch, loaded in made.steps():
        made.step(batch, loaded)
        if seat.rank == 0:
            made.model.eval()(torch.ones(2, 4, dtype=torch.float64))
            made.model.train()(torch.ones(2, 4, dtype=torch.float64))
    dist.barrier()
    return made.digests()["parameters"]


SKIPS = {
    "nan": toys.Points(12, bad=[3], badness="nan"),
    "inf": toys.Points(12, bad=[3], badness="inf"),
    "hidden": toys.Points(12, bad=[3], badness="hidden"),
    "gradient": toys.Points(12, bad=[3], badness="gradient"),
    "batch_norm": toys.Points(12, bad=[3], badness="input", batch_norm=True),
}
CASES: dict[str, Any] = {
    **{name: scene_case(name) for name in SCENES},
    **{f"stop at {name}": stopped(recipe) for name, recipe in SKIPS.items()},
    **{f"skip {name}": skipping(recipe) for name, recipe in SKIPS.items()},
    "streams": streams,
    "workers": workers,
    "refused synchronisation": refused_synchronisation,
    "bfloat16": precise("bfloat16"),
    "float64": precise("float64"),
    "alone on rank 0": alone_on_rank_0,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    with groups_of("tests.test_trainer", tmp_path_factory.mktemp("trainer")) as outcomes:
        yield outcomes


each_size = pytest.mark.parametrize("size", SIZES)


def joined(results: list[dict[str, Any]]) -> list[float]:
    """Return the losses that a run reports, as its records define them."""
    sums = [zip(r["losses"], r["counts"], strict=True) for r in results]
    return [sum(s for s, _ in step) / sum(c for _, c in step) for step in zip(*sums, strict=True)]


def assert_close(actual: Any, expected: Any, what: str, tolerance: float) -> None:
    if actual is None or expected is None:
        assert actual is expected, f"{what}: {actual} where one process has {expected}"
        return
    a, b = (torch.as_tensor(x).detach().to_dense().double() for x in (actual, expected))
    error, size = float((a - b).norm()), float(b.norm())
    assert error <= tolerance * max(size, 1e-3), f"{what}: {error:.3g} off, norm {size:.3g}"


@pytest.mark.ranks
@pytest.mark.parametrize("name", SCENES)
def test_trains_what_one_process_trains(outcomes: Outcomes, name: str) -> None:
    recipe, settings = SCENES[name]
    expected = plain(recipe, settings)
    tolerance = 1e-5 if settings.get("precision") == "float32" else 1e-12
    for results in [outcomes.of(size, name) for size in SIZES] + [[take_all(trainer(recipe, **settings))]]:
        ranks = len(results)
        assert_close(joined(results), expected["losses"], f"{ranks} ranks, losses", tolerance)
        for step, gradients in enumerate(expected["gradients"]):
            for key, value in gradients.items():
                assert_close(
                    results[0]["gradients"][step][key], value, f"{ranks} ranks, step {step}, gradient of {key}", tolerance
                )
        for key, value in expected["parameters"].items():
            assert_close(results[0]["parameters"][key], value, f"{ranks} ranks, {key}", tolerance)
            assert all(torch.equal(other["parameters"][key], results[0]["parameters"][key]) for other in results), (
                "bits of ranks"
            )
        for result in results:
            assert (result["lr"], result["skipped"]) == (expected["lr"], [False] * len(expected["losses"]))


@pytest.mark.ranks
def test_the_gradient_of_5_samples_is_that_of_one_process(outcomes: Outcomes) -> None:
    for result in outcomes.of(2, "a naive mean gives -200"):
        assert result["gradients"][0]["weight"].item() == -160.0
    assert joined(outcomes.of(2, "a naive mean gives -200")) == [16_000.0]


@pytest.mark.ranks
@each_size
@pytest.mark.parametrize("kind", ["nan", "inf", "hidden", "batch_norm"])
def test_a_loss_that_is_not_finite_stops_all_ranks(outcomes: Outcomes, size: int, kind: str) -> None:
    results = outcomes.of(size, f"stop at {kind}")
    own = [result for result in results if not result["consequence"]]
    assert len(own) == 1
    assert own[0]["message"].startswith(f"the loss is {'inf' if kind == 'inf' else 'nan'}; on_nonfinite=skip")
    for result in results:
        assert result is own[0] or result["message"].startswith("the loss of another rank is not finite; ")
        assert result["digests"]["parameters"] == own[0]["digests"]["parameters"]


@pytest.mark.ranks
@each_size
def test_gradients_that_are_not_finite_stop_all_ranks(outcomes: Outcomes, size: int) -> None:
    for result in outcomes.of(size, "stop at gradient"):
        assert result["message"].startswith("the gradients are not finite, though every loss is; ")
        assert not result["consequence"]


@pytest.mark.ranks
@each_size
@pytest.mark.parametrize("kind", SKIPS)
def test_steps_are_skipped_on_all_ranks_without_a_trace(outcomes: Outcomes, size: int, kind: str) -> None:
    results = outcomes.of(size, f"skip {kind}")
    for result in results:
        assert result["steps"] == results[0]["steps"]
        assert result["digests"] == results[0]["digests"] or kind == "batch_norm"
        for skipped, moved, finite, bad in result["steps"]:
            assert (skipped, moved, finite) == (bad, not bad, True)
    assert {skipped for skipped, *_ in results[0]["steps"]} == {True, False}


@pytest.mark.ranks
@each_size
def test_streams_differ_by_rank_and_repeat_by_seed(outcomes: Outcomes, size: int) -> None:
    results = outcomes.of(size, "streams")
    for result in results:
        (born, mask, order), (_, mask_again, order_again) = result["first"], result["again"]
        assert torch.equal(mask, mask_again) and order == order_again
        assert result["other"][0] != born and not torch.equal(mask, result["other"][1]) and order != result["other"][2]
        assert (born, order) == (results[0]["first"][0], results[0]["first"][2])
        assert order[:2] != order[2:]  # two epochs of two batches
    masks = {tuple(result["first"][1].tolist()) for result in results}
    assert len(masks) == size


@pytest.mark.ranks
@each_size
def test_workers_draw_streams_of_their_own_that_repeat(outcomes: Outcomes, size: int) -> None:
    seen = []
    for result in outcomes.of(size, "workers"):
        two, one, other_seed = result["noise"]
        assert all(torch.equal(a, b) for a, b in zip(two, one, strict=True)), "depends on the number of workers"
        assert all(torch.equal(a, b) for a, b in zip(two[1:], result["resumed"], strict=True)), "depends on where it began"
        seen += [value for batch in [*two, *other_seed] for value in batch.flatten().tolist()]
    assert len(set(seen)) == len(seen)


@pytest.mark.ranks
@each_size
def test_workers_change_no_bit_of_a_data_set_without_chance(outcomes: Outcomes, size: int) -> None:
    assert len({digest for result in outcomes.of(size, "workers") for digest in result["trained"]}) == 1


@pytest.mark.ranks
@each_size
def test_synchronised_batch_norm_refuses_empty_shards_alike_on_all_ranks(outcomes: Outcomes, size: int) -> None:
    for messages in outcomes.of(size, "refused synchronisation"):
        assert messages == [
            f"{who} needs samples on every rank in every step, and a batch of 1 is not enough for "
            f"nprocs={size} times grad_accumulation=1. Change global_batch_size, nprocs or steps."
            for who in ("sync_bn=true", "SyncBatchNorm")
        ]


@pytest.mark.ranks
def test_bfloat16_computes_under_autocast_and_keeps_float32(outcomes: Outcomes) -> None:
    results = outcomes.of(2, "bfloat16")
    expected = plain(toys.Points(18, dtype="float32"), {"precision": "float32"})
    for result in results:
        assert (set(result["kinds"]), result["dtype"]) == ({"torch.bfloat16"}, "torch.float32")
        assert all(value.dtype == torch.float32 for value in result["parameters"].values())
    assert_close(joined(results), expected["losses"], "losses", 2**-6)
    assert joined(results) != expected["losses"]


@pytest.mark.ranks
def test_float64_takes_float32_samples(outcomes: Outcomes) -> None:
    for result in outcomes.of(2, "float64"):
        assert (set(result["kinds"]), result["dtype"]) == ({"torch.float64"}, "torch.float64")


@pytest.mark.ranks
@each_size
def test_rank_0_may_use_the_model_alone(outcomes: Outcomes, size: int) -> None:
    assert len(set(outcomes.of(size, "alone on rank 0"))) == 1


# --- one process ----------------------------------------------------------------------------------------------------


def test_clipping_equals_torchs_in_bits() -> None:
    ours, torchs = (toys.Points().model() for _ in range(2))
    torchs.load_state_dict(ours.state_dict())
    for model in (ours, torchs):
        model(torch.ones(3, 4)).square().sum().backward()
    norm = clip_(gradient_values(ours.parameters()), 0.5)
    assert torch.equal(norm, clip_grad_norm_(torchs.parameters(), 0.5))
    for mine, its in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        assert torch.equal(mine.grad, its.grad)


def test_an_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    made = trainer(toys.Points(10), global_batch_size=4, steps=None, epochs=2)
    batches = [list(batch) for batch, _ in made.steps()]
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = functools.reduce(operator.iadd, batches[:3], []), functools.reduce(operator.iadd, batches[3:], [])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_steps_go_on_from_any_number() -> None:
    whole = [list(batch) for batch, _ in trainer(toys.Points(10), global_batch_size=4, steps=8).steps()]
    for done in range(8):
        rest = trainer(toys.Points(10), global_batch_size=4, steps=8).steps(done)
        assert [list(batch) for batch, _ in rest] == whole[done:]


def test_batches_of_a_recipe_are_the_same_whoever_asks() -> None:
    recipe = toys.Tokens((5, 9, 31, 40, 2, 7, 16))
    before = numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    first = epoch_batches(recipe, 7, 6, 0, 0)
    torch.manual_seed(5)
    assert epoch_batches(recipe, 7, 6, 0, 0) == first
    assert {tuple(epoch_batches(recipe, 7, 6, 0, epoch)[0]) for epoch in range(9)} != {tuple(first[0])}
    assert numpy.random.get_state()[1].tolist() == before[0]


@pytest.mark.parametrize("batches", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], []])
def test_batches_that_lose_or_repeat_a_sample_are_refused(batches: list[list[int]]) -> None:
    class Careless(toys.Points):
        def batches(self, order: Any, batch_size: int) -> Any:
            return batches

    with pytest.raises(ConfigError, match=r"Careless.batches\(\) must return each of the 3 samples exactly once"):
        trainer(Careless(3), steps=None, epochs=1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "returned a NoneType. Return a map-style data set"),
        (iter([1]), "returned a list_iterator. Return a map-style data set"),
        (Stream(), "returned a Stream. Return a map-style data set"),
        ([], "returned a list without a sample"),
    ],
)
def test_data_sets_that_cannot_be_trained_on_are_refused(dataset: Any, message: str) -> None:
    class Given(toys.Points):
        def dataset(self) -> Any:
            return dataset

    with pytest.raises(ConfigError) as error:
        trainer(Given())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: None, "returned None. Return the mean"),
        (lambda model, x: 1.0, "returned a float. Return the mean"),
        (lambda model, x: model(x).squeeze(1), "returned a tensor of shape (6,). Return the mean"),
        (lambda model, x: (model(x).sum(), 6, 1), "returned a tuple. Return the mean"),
        (lambda model, x: (model(x).sum(), model(x)), "returned (loss, a tensor of shape (6, 1)): the second is to be"),
        (lambda model, x: (model(x).sum(), {"n": 6}), "returned (loss, a dict): the second is to be"),
        (lambda model, x: model(x).sum().detach(), "depends on no trainable parameter"),
    ],
)
def test_losses_that_cannot_be_trained_on_are_refused(loss: Any, message: str) -> None:
    class Given(toys.Points):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return loss(model, batch[1])

    with pytest.raises(ConfigError) as error:
        take_all(trainer(Given()))
    assert str(error.value).startswith("Given.loss() returned") and message in str(error.value)


def test_losses_of_two_kinds_are_refused() -> None:
    class Mixed(toys.Points):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            loss = super().loss(model, batch)
            return (loss, 6) if 0 in batch[0] else loss

    with pytest.raises(ConfigError, match=r"Mixed.loss\(\) returns a mean for some batches, \(sum, count\) for others"):
        take_all(trainer(Mixed()))


def test_a_count_may_be_a_number() -> None:
    class Counted(toys.Points):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch) * len(batch[0]), numpy.int64(len(batch[0]))

    assert_close(
        take_all(trainer(Counted()))["gradients"][0]["0.bias"], plain(toys.Points(), {})["gradients"][0]["0.bias"], "", 1e-12
    )


def test_a_count_of_a_python_number_is_exact() -> None:
    loss = torch.ones((), requires_grad=True)
    items = loss_and_items((loss, 0.1), "loss()")[1]
    assert items is not None and float(items) == 0.1


def test_a_model_decides_itself_what_train_does() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self[2].eval()
            return self

    class Given(toys.Points):
        def model(self) -> nn.Module:
            return Frozen(*super().model())

    made = trainer(Given(dropout=0.5))
    take_all(made)
    assert [layer.training for layer in made.model] == [True, True, False, True]


def test_a_batch_without_items_is_not_a_number() -> None:
    class Nothing(toys.Points):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch) * 0, 0

    with pytest.raises(NonFinite, match=r"^loss\(\) counted no item on any rank; "):
        take_all(trainer(Nothing()))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: None, r"Given.model\(\) returned a NoneType, not an nn.Module"),
        (lambda: nn.LazyLinear(1), r"Given.model\(\) has lazy layers without a shape yet"),
        (nn.ReLU, r"Given.model\(\) has no parameter to train"),
        (lambda: nn.Linear(4, 1).requires_grad_(False), r"Given.model\(\) has no parameter to train"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model: Any, message: str) -> None:
    class Given(toys.Points):
        def model(self) -> Any:
            return model()

    with pytest.raises(ConfigError, match=message):
        trainer(Given())


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda parameters: None, r"Given.optimizer\(\) returned a NoneType, not an optimizer of torch"),
        (torch.optim.LBFGS, r"Given.optimizer\(\) returned a LBFGS, whose step\(\) takes a closure"),
    ],
)
def test_what_cannot_take_a_step_is_refused(optimizer: Any, message: str) -> None:
    class Given(toys.Points):
        def optimizer(self, model: nn.Module) -> Any:
            return optimizer(model.parameters())

    with pytest.raises(ConfigError, match=message):
        trainer(Given())


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau"),
        (lambda optimizer: [torch.optim.lr_scheduler.ConstantLR(optimizer)], "list"),
    ],
)
def test_what_cannot_be_stepped_after_each_step_is_refused(scheduler: Any, name: str) -> None:
    class Given(toys.Points):
        def scheduler(self, optimizer: Any) -> Any:
            return scheduler(optimizer)

    with pytest.raises(ConfigError, match=rf"Given.scheduler\(\) returned a {name}. Return one scheduler of torch's"):
        trainer(Given())


def test_a_recipe_is_made_of_its_settings() -> None:
    made = make_recipe({"_target_": "tests.toys.Points", "count": 3, "bad": [1]})
    assert isinstance(made, toys.Points) and (made.count, made.bad) == (3, {1})
    # Its keys come from a YAML, so the message says so, and no traceback of ours hides it.
    with pytest.raises(
        ConfigError, match=r"does not take all keys of the recipe's YAML: .* unexpected keyword argument 'cout'"
    ):
        make_recipe({"_target_": "tests.toys.Points", "cout": 3})


def test_a_recipe_without_a_method_is_told_which() -> None:
    with pytest.raises(ConfigError, match="has no method dataset and no method model and no method optimizer"):
        make_recipe({"_target_": "fractions.Fraction"})


def test_facts_hold_the_thread_count() -> None:
    assert trainer(toys.Points()).facts()["threads"] == torch.get_num_threads()


def test_the_plan_refuses_ranks_that_would_have_no_sample() -> None:
    plan = TrainPlan(recipe={"_target_": "x"}, global_batch_size=3)
    assert plan.problems(3) == []
    assert "leaves 1 of nprocs=4 ranks without a sample" in plan.problems(4)[0]
    several = replace(plan, global_batch_size=0, seed=-1, clip_norm=math.nan).problems(4)
    assert len(several) == 3


def test_synchronised_batch_norm_needs_as_many_pieces_on_every_rank() -> None:
    recipe = toys.Points(11, batch_norm=True)
    plan = TrainPlan(recipe={"_target_": "x"}, global_batch_size=6, sync_bn=True)

    def taken(num_steps: int, grad_accumulation: int) -> int:
        batches = Batches(replace(plan, grad_accumulation=grad_accumulation), recipe, recipe.dataset(), (1, 2))
        return len(list(batches.steps(0, num_steps, synchronises=True)))

    assert (taken(2, 1), taken(1, 3)) == (2, 1)
    with pytest.raises(ConfigError, match="a batch of 5 is not enough for nprocs=2 times grad_accumulation=3"):
        taken(2, 3)


def test_rows_of_tensors_are_what_torch_stacks_sample_by_sample() -> None:
    images = toys.numbers(9, 2, 3, 4)
    kinds = (
        images,
        images.to(memory_format=torch.channels_last),
        images.transpose(1, 3),
        images[:, :, 0, 0] > 0,
        torch.arange(9),
    )
    dataset = TensorDataset(*kinds)
    batches = [(8, 0, 3), (1,), (2, 2)]
    stacked = DataLoader(dataset, batch_sampler=batches)
    for mine, theirs in zip(load(dataset, batches, toys.Points(), 0, 0), stacked, strict=True):
        assert type(mine) is type(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other) and (one.dtype, one.stride()) == (other.dtype, other.stride())

"""Evaluation counts every sample once, at any number of ranks, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.errors import ConfigError
from harness.training.digest import value_digest
from harness.training.evaluate import eval_dataset_of, evaluate
from harness.training.parallel.ddp_strategy import DdpStrategy
from harness.training.seat import Seat
from harness.training.state import random_states
from tests import toys
from tests.ranks import Outcomes, groups_of
from tests.test_trainer import trainer

SIZES = (2, 3, 4)
COUNTS = (1, 2, 3, 10)


def counted(seat: Seat, folder: Path) -> list[dict[str, tuple[float, float]]]:
    """Evaluate data sets of several sizes, in batches of 4 over all ranks."""
    made = trainer(toys.Digits(), seat, global_batch_size=4)
    return [evaluate(made, toys.Digits(count).eval_dataset()) for count in COUNTS]


def traces(seat: Seat, folder: Path) -> dict[str, Any]:
    """Evaluate after two steps, on ranks whose BatchNorm statistics differ, then once more on rank 0 alone."""
    made = trainer(toys.Digits(), seat, steps=3, global_batch_size=8)
    steps = list(made.steps())
    for step in steps[:2]:
        made.step(*step)
    mean, before = float(made.model.running_mean), value_digest(random_states())
    found = evaluate(made, made.recipe.eval_dataset())
    alone = {}
    if seat.rank == 0:
        made.seat, strategy = Seat(0, 1, seat.device), made.strategy
        made.strategy = DdpStrategy(made.plan, made.seat)
        alone = evaluate(made, made.recipe.eval_dataset())
        made.seat, made.strategy = seat, strategy
    made.step(*steps[2])
    return {
        "found": found,
        "alone": alone,
        "mean": mean,
        "streams": (before, value_digest(random_states())),
        "training": made.model.training,
        "digests": made.digests(),
    }


def without(seat: Seat, folder: Path) -> dict[str, Any]:
    """Take the same steps without evaluating."""
    made = trainer(toys.Digits(), seat, steps=3, global_batch_size=8)
    for step in list(made.steps()):
        made.step(*step)
    return {"streams": value_digest(random_states()), "digests": made.digests()}


def with_workers(seat: Seat, folder: Path) -> list[dict[str, tuple[float, float]]]:
    return [evaluate(trainer(toys.Digits(), seat, num_workers=n), toys.Digits().eval_dataset()) for n in (0, 2)]


CASES = {"counted": counted, "traces": traces, "without": without, "with workers": with_workers}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    with groups_of("tests.test_evaluate", tmp_path_factory.mktemp("evaluate")) as outcomes:
        yield outcomes


each_size = pytest.mark.parametrize("size", SIZES)


@pytest.mark.ranks
@each_size
def test_every_sample_counts_once(outcomes: Outcomes, size: int, tmp_path: Path) -> None:
    alone = counted(Seat(0, 1, torch.device("cpu")), tmp_path)
    for result in outcomes.of(size, "counted"):
        assert [found["accuracy"] for found in result] == [(count - 1, count) for count in COUNTS]
        for found, expected in zip(result, alone, strict=True):
            assert found.keys() == expected.keys()
            assert all(found[name] == pytest.approx(expected[name], rel=1e-12, abs=1e-12) for name in expected)


@pytest.mark.ranks
@each_size
def test_a_metric_that_one_rank_alone_has_is_counted(outcomes: Outcomes, size: int) -> None:
    for result in outcomes.of(size, "counted"):
        assert ["of nine" in found for found in result] == [False, False, False, True]
        assert result[-1]["of nine"] == (9.0, 1.0)


@pytest.mark.ranks
@each_size
def test_evaluation_takes_rank_0s_statistics_and_gives_all_ranks_its_result(outcomes: Outcomes, size: int) -> None:
    first, *others = outcomes.of(size, "traces")
    assert all(other["mean"] != first["mean"] for other in others), "the case shows nothing"
    assert all(other["found"] == first["found"] for other in others)
    assert first["found"]["shifted"] == pytest.approx(first["alone"]["shifted"], rel=1e-12)


@pytest.mark.ranks
@each_size
def test_evaluation_leaves_streams_and_training_as_they_were(outcomes: Outcomes, size: int) -> None:
    for result, undisturbed in zip(outcomes.of(size, "traces"), outcomes.of(size, "without"), strict=True):
        assert result["streams"] == (undisturbed["streams"],) * 2
        assert result["digests"] == undisturbed["digests"]
        assert result["training"]


@pytest.mark.ranks
def test_workers_count_alike(outcomes: Outcomes) -> None:
    for alone, with_two in outcomes.of(2, "with workers"):
        assert alone == with_two


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval_dataset\(\) of the recipe returned a list without a sample"):
        evaluate(trainer(toys.Digits()), [])


@pytest.mark.parametrize("returned", [None, 1.0, {"accuracy": 0.5}, {"accuracy": (torch.ones(3), 3)}])
def test_what_is_no_metric_is_refused(returned: Any) -> None:
    made = trainer(toys.Digits())
    made.recipe.evaluate = lambda model, batch: returned
    with pytest.raises(ConfigError, match=r"Digits.evaluate\(\) returned .*Return a dict of name -> \(sum, count\)"):
        evaluate(made, made.recipe.eval_dataset())


def test_half_an_evaluation_is_refused() -> None:
    class Half(toys.Tokens):
        def eval_dataset(self) -> Any:
            return self.dataset()

    assert eval_dataset_of(toys.Tokens()) is None
    assert len(eval_dataset_of(toys.Digits())) == 10
    with pytest.raises(ConfigError, match=r"Half has eval_dataset\(\), but evaluation takes eval_dataset\(\) and evaluate\(\)"):
        eval_dataset_of(Half())
    assert not dist.is_initialized()

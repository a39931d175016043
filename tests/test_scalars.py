"""harness.log: numbers of one's own in records, terminal and TensorBoard, averaged over ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness.rank.context import Rank, inhabited
from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir
from harness.run.plan import RunPlan, Task
from harness.run.record import RankResult, RunResult, Scalar, run_result_from_json, to_json
from harness.run.recorder import Recorder

ROOT = Path(__file__).resolve().parent.parent

RECIPE = """
import harness, torch
from torch import nn
from torch.utils.data import TensorDataset

class Noted:
    def dataset(self):
        return TensorDataset(torch.arange(8.0)[:, None])
    def model(self):
        return nn.Linear(1, 1)
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.001)
    def loss(self, model, batch):
        harness.log("mine/size", batch[0].mean() * 0 + harness.get_rank())
        return model(batch[0]).square().mean()
"""


def recorded(tmp_path: Path, name: str = "x", values: tuple[float, ...] = (1.0, 2.0)) -> RankResult:
    run = RunDir(tmp_path)
    with Recorder(run.records(0)) as record, inhabited(Rank(run, RunPlan(Task("call")), RankEnvironment(), record)):
        for value in values:
            harness.log(name, value)
    return RankResult.from_events(0, run.events(0))


def test_a_number_is_recorded_with_how_often_it_was_logged(tmp_path: Path) -> None:
    assert recorded(tmp_path, "a").scalars == (Scalar("a", 0, 1.0), Scalar("a", 1, 2.0))


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"harness\.log\('x', \.\.\.\) takes a number, and got list \[1\]"):
        harness.log("x", [1])


def test_a_process_that_is_no_rank_logs_nothing() -> None:
    harness.log("x", 1.0)


def test_ranks_are_averaged_and_records_come_back() -> None:
    ranks = tuple(RankResult(rank, scalars=(Scalar("x", 3, float(rank)), Scalar("y", rank, 1.0))) for rank in range(2))
    result = RunResult("ok", ranks)
    assert result.scalars() == {"x": {3: 0.5}, "y": {0: 1.0, 1: 1.0}}
    assert run_result_from_json(to_json(result)) == result


@pytest.mark.ranks
def test_a_recipe_logs_its_training_and_not_its_verification(tmp_path: Path) -> None:
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "noted.yaml").write_text("_target_: noted.Noted\n")
    (tmp_path / "noted.py").write_text(RECIPE)
    command = [
        "recipe=noted",
        "nprocs=2",
        "backend=gloo",
        "global_batch_size=4",
        "steps=3",
        "log_every=1",
        "hydra.sweep.dir=out",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), f"--config-dir={tmp_path / 'conf'}", *command, "hydra.sweep.dir=out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  mine/size 0.5  ") == 3
    ranks = [RankResult.from_events(rank, RunDir(tmp_path / "out" / "0").events(rank)) for rank in range(2)]
    for rank in ranks:
        assert rank.scalars == tuple(Scalar("mine/size", step, float(rank.rank)) for step in range(3))

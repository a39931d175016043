"""What a training leaves to take home: weights that start another, that are evaluated, and that are used without harness."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.run.folder import RunDir
from harness.run.metric import is_better, lower_is_better
from harness.run.plan import TrainPlan
from harness.run.record import RankResult

ROOT = Path(__file__).resolve().parent.parent

USE = """
import torch
from safetensors.torch import load_model
from recipes.mnist import Mnist
model = Mnist().model()
load_model(model, "home/0/model.safetensors")
print(round(float(sum(p.sum() for p in model.parameters())), 6))
"""


def run(*overrides: str, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), "backend=gloo", "nprocs=2", f"hydra.sweep.dir={name}", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    result = RankResult.from_events(0, RunDir(folder).events(0))
    return {evaluation.step: evaluation.means() for evaluation in result.evaluations}


@pytest.mark.ranks
def test_weights_are_taken_home_and_evaluated(tmp_path: Path) -> None:
    done = run("steps=6", "eval_every=2", "keep_best=accuracy", folder=tmp_path, name="home")
    assert done.returncode == 0 and "Weights: home/0/model.safetensors" in done.stdout, done.stderr
    trained = metrics(tmp_path / "home" / "0")
    best = max(trained.values(), key=lambda means: means["accuracy"])
    for file, expected in (("0", trained[5]), ("0/best.safetensors", best)):
        evaluated = run("steps=0", f"weights=home/{file}", folder=tmp_path, name=f"look-{file[-4:].strip('/')}")
        assert evaluated.returncode == 0, evaluated.stderr
        assert metrics(tmp_path / f"look-{file[-4:].strip('/')}" / "0") == {-1: expected}
    assert not (tmp_path / "look-0" / "0" / "model.safetensors").exists()
    # Without harness: it must not be imported, though it lies on the path.
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    code = USE + "import sys\nassert not any(name.startswith('harness') for name in sys.modules)\n"
    alone = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert alone.returncode == 0 and float(alone.stdout), alone.stderr


@pytest.mark.ranks
def test_a_training_from_weights_is_proven_too(tmp_path: Path) -> None:
    assert run("steps=2", "compare=off", "report=none", folder=tmp_path, name="home").returncode == 0
    done = run("steps=2", "weights=home/0", folder=tmp_path, name="next")
    assert done.returncode == 0 and "verified: equal to 1 process" in done.stdout, done.stdout + done.stderr


@pytest.mark.ranks
def test_a_metric_that_is_none_is_told_before_the_first_step(tmp_path: Path) -> None:
    done = run("steps=500", "compare=off", "keep_best=acc", folder=tmp_path, name="out")
    assert done.returncode == 1 and "keep_best=acc: evaluate() returns accuracy, loss, and no acc." in done.stderr
    assert RankResult.from_events(0, RunDir(tmp_path / "out" / "0").events(0)).steps == ()


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("loss", True),
        ("val_loss", True),
        ("error/top5", True),
        ("rmse", True),
        ("accuracy", False),
        ("bleu", False),
        ("f1", False),
    ],
)
def test_the_better_direction_follows_from_the_name(name: str, lower: bool) -> None:
    assert lower_is_better(name) is lower
    assert is_better(name, 1.0, 2.0) is lower and is_better(name, 2.0, 1.0) is not lower
    assert is_better(name, 1.0, None) and not is_better(name, float("nan"), None) and not is_better(name, float("nan"), 1.0)


def test_what_excludes_each_other_is_told() -> None:
    recipe = {"_target_": "x.X"}
    told = TrainPlan(recipe, weights="a", resume="b").problems(2)
    assert told == ["weights=a starts a training, and resume=b goes on with one: give one of them."]
    told = TrainPlan(recipe, steps=0, resume="b").problems(2)
    assert told == ["steps=0 only evaluates, and resume=b goes on training: use weights=b."]

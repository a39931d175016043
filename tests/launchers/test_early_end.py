"""A training that ends with status 0 before its steps are done has failed, whatever starts its ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import jobs

pytestmark = pytest.mark.ranks

SETTINGS = ("global_batch_size=4", "steps=5", "compare=off", "report=default")


def sweep(folder: Path, *settings: str, **recipes: str) -> subprocess.CompletedProcess[str]:
    """Run the recipes that leave early; each is a file of its own."""
    (folder / "conf" / "recipe").mkdir(parents=True)
    for name, text in recipes.items():
        (folder / "conf" / "recipe" / f"{name}.yaml").write_text(text)
    return jobs.run(folder, f"recipe={','.join(recipes)}", *settings, *SETTINGS)


def messages(folder: Path, jobs_done: int) -> list[str]:
    """Return what became of each job, all of which have failed."""
    results = [json.loads(next((folder / str(number)).rglob("result.json")).read_text()) for number in range(jobs_done)]
    assert {(result["status"], result["failed_rank"]) for result in results} <= {("failed", 0), ("failed", 1)}
    return [result["message"] for result in results]


def leaving(place: str, how: str) -> str:
    return f"_target_: tests.toys.leaving.Leaving\nplace: {place}\nhow: {how}\n"


def test_one_rank_under_every_launcher(tmp_path: Path) -> None:
    recipes = {"step": leaving("step", "exit"), "step_os": leaving("step", "os_exit")}
    done = sweep(tmp_path, "launcher=launch,inline", "nprocs=1", **recipes)
    assert done.returncode == 1, jobs.said(done)
    assert messages(tmp_path, 4) == ["rank 0 of 1 exited with status 0 after step 2 of 5, before its task was done."] * 4


def test_every_rank_before_the_first_step(tmp_path: Path) -> None:
    recipes = {
        "data": leaving("dataset", "exit"),
        "data_os": leaving("dataset", "os_exit"),
        "module": "_target_: tests.toys.leaving_at_import.Leaving\n",
    }
    done = sweep(tmp_path, "launcher=spawn", "nprocs=2", **recipes)
    assert done.returncode == 1, jobs.said(done)
    for message in messages(tmp_path, 3):
        assert "of 2 exited with status 0 before step 1 of 5, before its task was done" in message

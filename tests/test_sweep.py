"""One real sweep from Hydra's command line, with a recipe of somebody's own; the tests read the folder that it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.compare.performance.phases import PHASES
from harness.run.folder import RunDir
from harness.run.json_text import from_json_text
from harness.run.plan import RunPlan
from harness.run.record import RunResult, run_result_from_json, to_json
from tests.processes import PATIENCE_S, alive

ROOT = Path(__file__).parents[1]
BASE: dict[str, Any] = {
    "nprocs": 2,
    "steps": 6,
    "global_batch_size": 8,
    "seed": 3,
    "launcher": {"timeout_s": PATIENCE_S},
    "compare": {"tier": "off"},
    "report": {"reporters": {}},
}


def case(launcher: str = "spawn", recipe: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    chosen = [{"override /launcher": launcher}]
    return {"defaults": chosen, **BASE, "recipe": dict(recipe or {}), **settings}


MISTAKES = {
    "no length": "dataset() of the recipe returned a NoLength. Return a map-style data set, which has a length.",
    "None": "Mine.loss() returned None. Return the mean over the batch as a tensor of one element, or (sum, number of items).",
    "a float": "Mine.loss() returned a float. Return the mean over the batch as a tensor of one element, "
    "or (sum, number of items).",
    "no mean": "Mine.loss() returned a tensor of shape (4,). Return the mean over the batch as a tensor of one element, "
    "or (sum, number of items).",
    "no parameter": "Mine.model() has no parameter to train.",
}

# In this order, which is that of their job numbers.
JOBS: dict[str, dict[str, Any]] = {
    "plain": case(eval_every=4),
    **{fault.replace(" ", "_"): case(recipe={"fault": fault}) for fault in MISTAKES},
    "again": case(),
    "launch": case("launch"),
    "alone": case(nprocs=1),
    "workers": case(num_workers=2),
    "half": case(steps=3, checkpoint_every=2),
    "resumed": case(resume="out, of=it/sweep/half", compare={"tier": "quick"}, hydra={"job": {"chdir": True}}),
    "reached": case(steps=3, resume="${hydra.sweep.dir}/half/checkpoint.pt"),
    "nothing_to_resume": case(resume="${hydra.sweep.dir}/nowhere"),
    "slow": case(recipe={"sleep_s": 2.0}),
    "prepared": case(nprocs=3, recipe={"folder": "${hydra.sweep.dir}/.."}, steps=None, epochs=2),
    "worker": case(num_workers=2, recipe={"fault": "worker", "folder": "${hydra.sweep.dir}/.."}),
    "infinite": case(recipe={"fault": "infinite"}),
    "infinite_skipped": case(recipe={"fault": "infinite"}, on_nonfinite="skip"),
    "no_folder": case(recipe={"folder": "/nowhere"}),
    "constructor": case(recipe={"fault": "constructor"}),
    "nothing_to_optimize": case(recipe={"fault": "nothing to optimize"}),
    "other_class": case(recipe={"_target_": "mine.Mien"}),
    "other_module": case(recipe={"_target_": "mnie.Mine"}),
    "good": case(threads=2),
}


def start_time(pid: int) -> str:
    """Return when a process began, which tells it from another one of the same number; empty for none."""
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().rpartition(")")[2].split()[19] if path.exists() else ""


class Sweep:
    """What a command left."""

    def __init__(self, folder: Path, finished: subprocess.CompletedProcess[str]) -> None:
        self.folder = folder
        self.finished = finished

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / name)

    def result(self, name: str) -> RunResult:
        return run_result_from_json(from_json_text(self.run(name).result.read_text()))

    def digests(self, name: str) -> dict[int, Any]:
        """Return the digests of a run, by the number of steps before them; the same on all ranks."""
        ranks = [{d["done"]: d for d in rank.digests} for rank in self.result(name).ranks]
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]


def command(project: Path, *arguments: str, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            str(ROOT / "run.py"),
            f"--config-dir={project / 'conf'}",
            *flags,
            "backend=gloo",
            "recipe=mine",
            *arguments,
        ],
        cwd=project,
        env={**os.environ, "PYTHONPATH": "."},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def quoted(value: object) -> str:
    """Return a value as Hydra's command line takes it whole."""
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe of its own and its configuration, under a name that wants quoting."""
    folder = tmp_path_factory.mktemp("project") / 'it\'s a "project", a=b'
    shutil.copytree(ROOT / "tests" / "project", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "conf" / "case").mkdir()
    for name, content in JOBS.items():
        text = f"# @package _global_\n{yaml.safe_dump(content, sort_keys=False)}"
        (folder / "conf" / "case" / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="session")
def sweep(project: Path) -> Iterator[Sweep]:
    folder = project / "out, of=it" / "sweep"
    names = f"+case={','.join(JOBS)}"
    where = [f"hydra.sweep.dir={quoted(folder)}", "hydra.sweep.subdir=${hydra:runtime.choices.case}"]
    finished = command(project, names, *where, flags=["-m"])
    assert folder.exists(), finished.stdout + finished.stderr
    yield Sweep(folder, finished)
    shutil.rmtree(folder)


pytestmark = pytest.mark.ranks


def test_good_jobs_succeed_beside_those_that_fail(sweep: Sweep) -> None:
    failing = {fault.replace(" ", "_") for fault in MISTAKES} | {
        *("reached", "nothing_to_resume", "worker", "infinite", "no_folder"),
        *("constructor", "nothing_to_optimize", "other_class", "other_module"),
    }
    found = {name: sweep.result(name) for name in JOBS}
    assert {name: r.message for name, r in found.items() if r.status != "ok" and name not in failing} == {}
    assert {name for name, r in found.items() if r.status == "failed"} == failing
    assert sweep.finished.returncode == 1


# --- the same training, however it was started ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["again", "launch", "workers", "good"])
def test_training_is_the_same_in_bits(sweep: Sweep, name: str) -> None:
    assert sweep.digests(name) == sweep.digests("plain")
    assert sweep.result(name).losses() == sweep.result("plain").losses()
    assert sweep.result(name).ranks[0].value == sweep.result("plain").ranks[0].value


def test_new_processes_go_on_in_bits_verified_or_not(sweep: Sweep) -> None:
    whole, half, rest = (sweep.digests(name) for name in ("plain", "half", "resumed"))
    assert half[3] == whole[3] == rest[3]
    assert rest[6] == whole[6]
    assert sweep.result("resumed").losses() == sweep.result("plain").losses()[3:]
    assert [step.step for step in sweep.result("resumed").ranks[0].steps] == [3, 4, 5]
    assert sweep.run("resumed").evidence.exists()


def test_a_checkpoint_is_left_after_the_last_step(sweep: Sweep) -> None:
    assert torch.load(sweep.run("half").checkpoint)["step"] == 3


def test_nothing_is_left_to_resume(sweep: Sweep) -> None:
    path = sweep.folder / "half" / "checkpoint.pt"
    message = (
        f"resume={path}: the checkpoint has 3 steps behind it, and this run has 3 in all. None is left: use steps=4 or more."
    )
    assert sweep.result("reached").message == message
    missing = sweep.folder / "nowhere"
    assert sweep.result("nothing_to_resume").message == (
        f"resume={missing}: there is no checkpoint there. checkpoint_every=N writes some."
    )


# --- records --------------------------------------------------------------------------------------------------------


def test_the_reported_loss_is_that_of_one_process(sweep: Sweep) -> None:
    # Dropout differs by rank, so the first step alone is compared, in evaluation.
    two, one = sweep.result("plain"), sweep.result("alone")
    assert (
        [sum(r.steps[i].count for r in two.ranks) for i in range(6)] == [r.count for r in one.ranks[0].steps] == [8, 8, 4] * 2
    )
    assert [e.metrics["loss"][1] for e in two.ranks[0].evaluations] == [5, 5]
    assert [e.step for e in two.ranks[0].evaluations] == [3, 5]
    assert two.ranks[0].evaluations == two.ranks[1].evaluations
    assert two.ranks[0].value == pytest.approx(two.ranks[0].evaluations[-1].means()["loss"])


def test_a_result_survives_being_written(sweep: Sweep) -> None:
    for name in ("plain", "infinite", "no_folder"):
        result = sweep.result(name)
        assert run_result_from_json(json.loads(json.dumps(to_json(result)))) == result


def test_a_rank_records_as_it_goes(sweep: Sweep) -> None:
    for rank in range(2):
        events = sweep.run("plain").events(rank)
        assert [event["step"] for event in events if event["event"] == "step"] == list(range(6))
        assert (events[0]["event"], events[-1]["event"], events[-1]["status"]) == ("start", "end", "ok")


@pytest.mark.parametrize("name", ["plain", "launch", "resumed"])
def test_marks_have_the_names_and_the_order_of_phases(sweep: Sweep, name: str) -> None:
    for rank in sweep.result(name).ranks:
        phases = [mark for mark in rank.marks if mark in PHASES]
        assert phases == [phase for phase in PHASES if phase in phases]
        assert list(rank.marks.values()) == sorted(rank.marks.values())
        start = ["code entered", "task loaded", "torch imported", "lazy imports done", "group ready", "data and model"]
        proof = ["verified"] if name == "resumed" else []
        wanted = [*start, *proof, "DDP built", "first step", "warm", "last step", "finished"]
        assert phases == wanted


def test_threads_are_recorded_per_rank(sweep: Sweep) -> None:
    plan = RunPlan.read(sweep.run("plain"))
    assert [rank.facts["threads"] for rank in sweep.result("plain").ranks] == [plan.threads] * 2
    assert [rank.facts["threads"] for rank in sweep.result("good").ranks] == [2, 2]


def test_a_slow_first_step_counts_as_starting(sweep: Sweep) -> None:
    slow, plain = sweep.result("slow"), sweep.result("plain")
    assert slow.step_seconds()[0] >= 2.0
    assert slow.first_step_s() >= 2.0
    warm = RunPlan.read(sweep.run("slow")).train.warmup_steps
    assert max(slow.step_seconds()[warm:]) < slow.step_seconds()[0]
    assert slow.ranks[0].marks["first step"] - slow.ranks[0].marks["DDP built"] >= 2.0
    assert slow.losses() == plain.losses()


def test_epochs_are_whole_and_data_is_prepared_once(sweep: Sweep) -> None:
    result = sweep.result("prepared")
    assert [sum(r.steps[i].count for r in result.ranks) for i in range(6)] == [8, 8, 4, 8, 8, 4]
    assert len(result.losses()) == 6
    first_of_each = (sweep.folder.parent / "prepared").read_text().split()
    assert first_of_each == ["0", "0"]  # of this job, and of the one named worker


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", MISTAKES)
def test_a_mistake_in_a_recipe_is_one_sentence(sweep: Sweep, fault: str) -> None:
    assert sweep.result(fault.replace(" ", "_")).message == MISTAKES[fault]


def test_a_refused_setting_is_told_by_its_message_alone(sweep: Sweep) -> None:
    assert sweep.result("no_folder").message == "recipe.folder=/nowhere: there is no such folder."
    assert "Traceback" not in sweep.run("no_folder").log(0).read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other_class", "recipe._target_=mine.Mien: there is no class Mien in mine. Did you mean mine.Mine?"),
        ("other_module", "recipe._target_=mnie.Mine: there is no module mnie. Did you mean mine?"),
    ],
)
def test_an_unknown_class_is_told_with_the_closest(sweep: Sweep, name: str, message: str) -> None:
    assert sweep.result(name).message.startswith(message)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("constructor", "ValueError: not about a setting"),
        ("nothing_to_optimize", "ValueError: optimizer got an empty parameter list"),
    ],
)
def test_any_other_error_names_the_line(sweep: Sweep, name: str, error: str) -> None:
    result = sweep.result(name)
    assert re.match(rf"rank \d of 2 failed( at step 0)?: {error} \(mine\.py:\d+\)\. ", result.message)
    assert result.see.endswith(".log")


def test_a_loss_that_is_not_finite_stops_with_rank_and_step(sweep: Sweep) -> None:
    result = sweep.result("infinite")
    ranks = [len(rank.steps) for rank in result.ranks]
    assert ranks[0] == ranks[1]
    assert re.match(rf"rank \d of 2 failed at step {ranks[0]}: NonFinite: the loss is inf; on_nonfinite=skip", result.message)


def test_skipped_steps_are_recorded_on_all_ranks_and_training_goes_on(sweep: Sweep) -> None:
    result = sweep.result("infinite_skipped")
    flags = [[step.skipped for step in rank.steps] for rank in result.ranks]
    assert flags[0] == flags[1]
    assert sum(flags[0]) == 2  # once in each of two epochs
    assert flags[0].index(True) == len(sweep.result("infinite").ranks[0].steps)
    assert [loss == float("inf") for loss in result.losses()] == flags[0]
    assert result.ranks[0].value < float("inf")


def test_workers_of_a_failed_run_are_gone(sweep: Sweep) -> None:
    result = sweep.result("worker")
    assert re.search(r"RuntimeError: (Caught RuntimeError.*)?sample 7 is broken", result.message, re.DOTALL)
    assert "mine.py" in result.message
    workers = {int(path.name.partition("-")[2]): path.read_text() for path in sweep.folder.parent.glob("worker-*")}
    assert len(workers) >= 3
    assert not any(alive(pid) and began == start_time(pid) for pid, began in workers.items())


def test_failures_are_told_when_they_happen_and_in_the_end(sweep: Sweep) -> None:
    said = sweep.finished.stdout + sweep.finished.stderr
    for message in [sweep.result("no_folder").message, sweep.result("infinite").message.partition(" Log")[0]]:
        assert message in said


# --- other commands -------------------------------------------------------------------------------------------------


def test_a_sweeper_gets_rank_0s_values(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    finished = command(
        project,
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra/sweeper/sampler=random"),
        *("hydra.sweeper.sampler.seed=1", "recipe.lr=interval(0.01,0.2)", "+x=1", "nprocs=2", "steps=2", "compare=off"),
        *("global_batch_size=8", "report.reporters=null", f"hydra.sweep.dir={tmp_path}/sweep"),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    values = [Sweep(tmp_path / "sweep", finished).result(str(number)).ranks[0].value for number in range(3)]
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert len(set(values)) == 3
    assert best["best_value"] == min(values)


def test_all_mistakes_in_settings_are_told_before_any_rank_starts(project: Path, tmp_path: Path) -> None:
    finished = command(
        project,
        *("global_batch_size=3", "nprocs=4", "steps=-1", "precision=float8", "on_nonfinite=maybe", "clip_norm=-1"),
        f"hydra.sweep.dir={tmp_path}/sweep",
    )
    said = finished.stdout + finished.stderr
    assert finished.returncode == 1
    assert "5 settings need mending" in said
    wanted = [
        "global_batch_size=3 leaves 1 of nprocs=4 ranks",
        "steps=-1 must",
        "precision=float8",
        "on_nonfinite=maybe",
        "clip_norm=-1",
    ]
    assert [text for text in wanted if text not in said] == []
    assert "Traceback" not in said
    assert not list(tmp_path.glob("**/*.jsonl"))


def test_launches_without_a_measured_step_are_refused_before_any_rank_starts(project: Path, tmp_path: Path) -> None:
    finished = command(project, "compare.pairs=2", "steps=3", "global_batch_size=8", f"hydra.sweep.dir={tmp_path}/sweep")
    said = "compare.pairs=2 compares measured steps, and steps=3 leaves none after warmup_steps=3: use steps=4 or more."
    assert finished.returncode == 1 and said in finished.stdout + finished.stderr
    assert not list(tmp_path.glob("**/*.jsonl"))


@pytest.mark.ranks
def test_a_checkpoint_that_is_not_there_is_told_before_any_rank_starts(project: Path, tmp_path: Path) -> None:
    finished = command(project, f"resume={tmp_path}/nowhere", "global_batch_size=8", f"hydra.sweep.dir={tmp_path}/sweep")
    said = f"resume={tmp_path}/nowhere: there is no checkpoint there. checkpoint_every=N writes some."
    assert finished.returncode == 1 and said in finished.stdout + finished.stderr
    assert not list(tmp_path.glob("**/*.jsonl"))

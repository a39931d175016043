"""R12 in real jobs: a training that is interrupted and goes on in new processes, or does not go on as it was."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from harness.report.sweep.folder import read_sweep
from harness.run.folder import RunDir
from tests.jobs import run, said

pytestmark = pytest.mark.ranks

SETTINGS = ("backend=gloo", "precision=float64", "global_batch_size=8", "compare=full", "report=none")
# In this order, which is that of their job numbers.
JOBS = {
    "spawn": {"recipe": "scheduled", "nprocs": 3},
    "launch": {"launcher": "launch", "recipe": "points", "nprocs": 3},
    "statistics": {"recipe": "points", "nprocs": 2, "settings": {"recipe": {"batch_norm": True, "count": 16}}},
    "forgetful": {"recipe": "forgetful", "nprocs": 2},
    "one_step": {"recipe": "points", "nprocs": 2, "settings": {"steps": 1}},
    "inline_of_one_step": {"launcher": "inline", "recipe": "points", "nprocs": 1, "settings": {"steps": 1}},
    "inline": {"launcher": "inline", "recipe": "points", "nprocs": 1, "settings": {"steps": 3}},
}


def case(launcher="spawn", recipe="points", nprocs=2, settings=None):
    chosen = [{"override /launcher": launcher}, {"override /recipe": recipe}]
    return {"defaults": chosen, "nprocs": nprocs, "steps": 4, **(settings or {})}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Return the folder of a sweep over all jobs, and what its command printed."""
    folder = tmp_path_factory.mktemp("resuming")
    (folder / "conf" / "case").mkdir(parents=True)
    for name, settings in JOBS.items():
        (folder / "conf" / "case" / f"{name}.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(case(**settings))}")
    done = run(folder, "-m", f"+case={','.join(JOBS)}", *SETTINGS)
    assert done.returncode == 1, done.stdout + done.stderr
    return folder, said(done)


def resumes(folder):
    """Return what the jobs of a sweep say of R12, by their names."""
    jobs = read_sweep(folder).jobs
    checks = [next((check for check in job.correctness.checks if check.name == "R12"), None) for job in jobs]
    return dict(zip(JOBS, checks, strict=True))


def place(folder, name):
    return RunDir(folder / str(list(JOBS).index(name)))


@pytest.mark.parametrize("name", ["spawn", "launch"])
def test_an_interrupted_training_goes_on_as_it_was(sweep, name):
    folder, _ = sweep
    sentence = "R12 (resume) is green: the resumed run has the whole run's digests, after 1, 2, 3 steps."
    assert resumes(folder)[name].sentence() == sentence
    whole = place(folder, name)
    pids = [
        {event["pid"] for rank in range(3) for event in each.events(rank) if event["event"] == "start"}
        for each in (whole, whole.interrupted, whole.resumed)
    ]
    assert len(set.union(*pids)) == 9
    assert not whole.checkpoint.exists() and not whole.interrupted.checkpoint.exists()


def test_buffers_of_each_rank_are_rank_0s_after_a_checkpoint(sweep):
    assert resumes(sweep[0])["statistics"].status == "passed"


def test_state_that_no_checkpoint_holds_is_missed(sweep):
    folder, printed = sweep
    assert [name for name, check in resumes(folder).items() if check.status == "failed"] == ["forgetful"]
    seen = "R12 (resume) at step 1, rank 0, stage parameters: the bits of the whole run and the resumed one differ"
    assert printed.count(seen) == 1


def test_one_step_or_no_new_process_is_told(sweep):
    folder, _ = sweep
    details = {name: check.detail for name, check in resumes(folder).items()}
    assert details["inline"] == details["inline_of_one_step"] == "launcher=inline has no new process that could go on"
    assert details["one_step"] == "the training has too few steps to be interrupted"
    alone = [place(folder, name) for name in ("one_step", "inline", "inline_of_one_step")]
    assert not any(job.interrupted.path.exists() for job in alone)


@pytest.fixture
def copied(sweep, tmp_path):
    """Return a copy of the sweep's folder, to change."""
    return shutil.copytree(sweep[0], tmp_path / "copied")


def test_a_resumed_run_that_failed_is_red(copied):
    path = place(copied, "spawn").resumed.result
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "failed", "message": "out of memory."}))
    check = resumes(copied)["spawn"]
    assert check.status == "failed" and check.detail == "the resumed run failed: out of memory"


def test_one_that_was_ended_from_outside_says_nothing(copied):
    place(copied, "spawn").resumed.result.unlink()
    check = resumes(copied)["spawn"]
    assert check.status == "not checked"
    assert check.detail == "the resumed run was not started, or was ended from outside"


def test_a_job_that_went_on_from_its_own_checkpoint_cannot_be_repeated(tmp_path):
    settings = ("recipe=points", "nprocs=2", "checkpoint_every=1", *SETTINGS)
    assert run(tmp_path, "steps=1", *settings).returncode == 0
    again = ("steps=5", f"resume={tmp_path / '0'}", "compare.pairs=1", "compare.aa=true")
    done = run(tmp_path, *again, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    job = read_sweep(tmp_path).jobs[0]
    details = {check.name: check.detail for check in job.correctness.checks}
    assert details["R12"] == "the training went on from a checkpoint that it has overwritten"
    assert not job.trials

"""R12 in real jobs: a training that is interrupted and goes on in new processes, or does not go on as it was."""

from __future__ import annotations

import json

import pytest

from harness.report.sweep.folder import read_sweep
from harness.run.folder import RunDir
from tests.jobs import run, said

pytestmark = pytest.mark.ranks

SETTINGS = ("backend=gloo", "precision=float64", "global_batch_size=8", "steps=4", "compare=full", "report=none")


@pytest.mark.parametrize(("launcher", "recipe"), [("spawn", "scheduled"), ("launch", "points")])
def test_an_interrupted_training_goes_on_as_it_was(tmp_path, launcher, recipe):
    done = run(tmp_path, f"launcher={launcher}", f"recipe={recipe}", "nprocs=3", *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check.name: check for check in read_sweep(tmp_path).jobs[0].correctness.checks}
    assert (
        checks["R12"].sentence() == "R12 (resume) is green: the resumed run has the whole run's digests, after 1, 2, 3 steps."
    )
    whole = RunDir(tmp_path / "0")
    pids = [
        {event["pid"] for rank in range(3) for event in each.events(rank) if event["event"] == "start"}
        for each in (whole, whole.interrupted, whole.resumed)
    ]
    assert len(set.union(*pids)) == 9
    assert not whole.checkpoint.exists() and not whole.interrupted.checkpoint.exists()


def test_buffers_of_each_rank_are_rank_0s_after_a_checkpoint(tmp_path):
    done = run(tmp_path, "recipe=points", "+recipe.batch_norm=true", "recipe.count=16", "nprocs=2", *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {check.name: check.status for check in read_sweep(tmp_path).jobs[0].correctness.checks}["R12"] == "passed"


def test_state_that_no_checkpoint_holds_is_missed(tmp_path):
    done = run(tmp_path, "recipe=forgetful", "nprocs=2", *SETTINGS)
    assert done.returncode == 1
    seen = "R12 (resume) is red at step 1, rank 0, parameters: the bits of the whole run and the resumed one differ"
    assert seen in said(done)


def test_one_step_or_no_new_process_is_told(tmp_path):
    short = [one for one in SETTINGS if not one.startswith("steps=")]
    done = run(tmp_path, "-m", "nprocs=1", "steps=1,3", "launcher=inline", "recipe=points", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    details = [{check.name: check.detail for check in job.correctness.checks}["R12"] for job in read_sweep(tmp_path).jobs]
    assert details == ["launcher=inline has no new process that could go on"] * 2
    assert "interrupted" not in done.stdout + done.stderr
    done = run(tmp_path, "nprocs=2", "steps=1", "recipe=points", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check.name: check for check in read_sweep(tmp_path / "0").jobs[0].correctness.checks}
    assert checks["R12"].detail == "the training has too few steps to be interrupted"


def test_a_resumed_run_that_failed_is_red(tmp_path):
    assert run(tmp_path, "recipe=points", "nprocs=2", *SETTINGS).returncode == 0
    path = RunDir(tmp_path / "0").resumed.result
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "failed", "message": "out of memory."}))
    checks = {check.name: check for check in read_sweep(tmp_path).jobs[0].correctness.checks}
    assert checks["R12"].status == "failed" and checks["R12"].detail == "the resumed run failed: out of memory"


def test_one_that_was_ended_from_outside_says_nothing(tmp_path):
    assert run(tmp_path, "recipe=points", "nprocs=2", *SETTINGS).returncode == 0
    RunDir(tmp_path / "0").resumed.result.unlink()
    checks = {check.name: check for check in read_sweep(tmp_path).jobs[0].correctness.checks}
    assert checks["R12"].status == "not checked"
    assert checks["R12"].detail == "the resumed run was not started, or was ended from outside"


def test_a_job_that_went_on_from_its_own_checkpoint_cannot_be_repeated(tmp_path):
    whole = [one for one in SETTINGS if not one.startswith("steps=")]
    settings = ("recipe=points", "nprocs=2", "checkpoint_every=1", *whole)
    assert run(tmp_path, "steps=1", *settings).returncode == 0
    again = ("steps=5", f"resume={tmp_path / '0'}", "compare.pairs=1", "compare.aa=true")
    done = run(tmp_path, *again, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    job = read_sweep(tmp_path).jobs[0]
    details = {check.name: check.detail for check in job.correctness.checks}
    assert details["R12"] == "the training went on from a checkpoint that it has overwritten"
    assert not job.trials

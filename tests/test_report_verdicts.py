"""What can be compared only when runs are over joins their verdicts: training with verification, run with run."""

from __future__ import annotations

import json
import signal

import pytest
from hydra.core.utils import JobReturn, JobStatus

from harness.compare.correctness.verdict import Verdict
from harness.entrypoints import hydra_jobs
from harness.entrypoints.hydra_jobs import JobFailed, fail_the_red
from harness.launchers.signals import Interrupted
from harness.report.sweep.build import sweep_report
from harness.report.sweep.folder import SweepDir, read_sweep
from harness.run.folder import RunDir
from harness.run.job import Job
from tests.reports import MACHINE, failed_result, job_of, recorded, with_trial, with_trials


def spoil_digest(folder, done):
    """Change the digest of rank 0's parameters after ``done`` steps of a recorded run."""
    path = RunDir(folder).result
    data = json.loads(path.read_text())
    link = next(link for link in data["ranks"][0]["digests"] if link["done"] == done)
    link["parameters"] = "0" * 16
    path.write_text(json.dumps(data))


def checks_of(sweep, number):
    verdict = next(job.correctness for job in sweep.jobs if job.plan.job == number)
    assert isinstance(verdict, Verdict)
    return {check.name: check.status for check in verdict.checks}


def test_honest_runs_pass_both(tmp_path):
    sweep = read_sweep(recorded("four_jobs", tmp_path))
    assert checks_of(sweep, 1)["R13"] == "passed"
    assert [checks_of(sweep, number).get("R10") for number in range(4)].count("passed") >= 1


def test_a_training_that_leaves_what_was_verified_is_red(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    spoil_digest(folder / "0", done=1)
    assert checks_of(read_sweep(folder), 0)["R13"] == "failed"


def test_launchers_that_train_differently_are_red_and_fail_the_job(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    job = next(number for number in range(4) if checks_of(read_sweep(folder), number).get("R10") == "passed")
    last = max(link["done"] for link in json.loads(RunDir(folder / str(job)).result.read_text())["ranks"][0]["digests"])
    spoil_digest(folder / str(job), done=last)
    sweep = read_sweep(folder)
    assert checks_of(sweep, job)["R10"] == "failed"
    jobs = [Job(one.plan, RunDir(one.folder)) for one in sweep.jobs]
    returns = [JobReturn(status=JobStatus.COMPLETED) for _ in jobs]
    fail_the_red(sweep, jobs, returns)
    assert [answer.status == JobStatus.FAILED for answer in returns] == [number == job for number in range(4)]
    with pytest.raises(JobFailed, match="R10"):
        _ = returns[job].return_value


def test_who_ends_a_sweep_is_told_how_to_see_what_was_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hydra_jobs.registry, "close_all", lambda: None)
    before = signal.getsignal(signal.SIGINT)
    for folder, hint in ((recorded("four_jobs", tmp_path), True), (tmp_path / "none", False)):
        with pytest.raises(SystemExit) as ended:
            hydra_jobs._leave(Interrupted(signal.SIGINT), SweepDir(folder))
        said = f"\nended by SIGINT: all ranks were stopped.{HINT if hint else ''}\n"
        assert (ended.value.code, capsys.readouterr().err) == (130, said)
    signal.signal(signal.SIGINT, before)


HINT = " What was done is shown by: python -m harness.compare outputs/2026-11-30/four_jobs"


def test_a_launch_for_a_comparison_that_failed_fails_its_job():
    jobs = [with_trials(job_of(0), 1.0), with_trial(with_trials(job_of(1, "launch"), 1.0), 0, lambda _: failed_result(1))]
    returns = [JobReturn(status=JobStatus.COMPLETED) for _ in jobs]
    fail_the_red(sweep_report("f", jobs, MACHINE), [Job(job.plan, RunDir("f")) for job in jobs], returns)
    assert [answer.status for answer in returns] == [JobStatus.COMPLETED, JobStatus.FAILED]
    with pytest.raises(JobFailed, match="1 of its 6 launches for the comparison failed"):
        _ = returns[1].return_value

"""Verification through the command: what it says, what it stops, what jobs of one sweep share; on real ranks."""

from __future__ import annotations

import json

import pytest

from harness.compare.detection import audit_table, trials_of
from harness.report.sweep.folder import read_audit, read_sweep
from harness.report.trace import PROCESSES_OF_A_RANK
from harness.run.faults import FAULTS
from harness.run.folder import RunDir
from tests.jobs import run, said

pytestmark = pytest.mark.ranks

SETTINGS = ("backend=gloo", "precision=float64", "global_batch_size=8", "steps=4", "report=none", "recipe=points")


def checks_of(job):
    return {check.name: check for check in job.correctness.checks}


def num_trained(run_dir):
    """Return how many steps rank 0 has trained, after its verification."""
    return sum(event["event"] == "step" for event in run_dir.events(0))


def test_a_fault_stops_the_job_before_it_trains(tmp_path):
    done = run(tmp_path, *SETTINGS, "nprocs=2", "fault=last_bias_not_reduced")
    assert done.returncode == 1
    assert "R4 (reduction) is red at step 0, rank 1, tensor 3.bias: not the mean of both ranks' gradients" in said(done)
    assert num_trained(RunDir(tmp_path / "0")) == 0
    assert read_sweep(tmp_path).jobs[0].correctness.label == "FAILED R4"


def test_a_job_that_is_only_warned_goes_on(tmp_path):
    done = run(tmp_path, *SETTINGS, "nprocs=2", "fault=last_bias_not_reduced", "compare.on_mismatch=warn")
    assert done.returncode == 0, said(done)
    assert num_trained(RunDir(tmp_path / "0")) == 4
    assert read_sweep(tmp_path).jobs[0].correctness.label == "FAILED R4"
    assert "R4 (reduction) is red" in RunDir(tmp_path / "0").log(0).read_text() + said(done)


def test_ranks_that_drift_after_the_verified_steps_fail_the_job(tmp_path):
    done = run(tmp_path, *SETTINGS, "nprocs=2", "recipe=drifting", "steps=9")
    assert done.returncode == 1
    # Once: by the note under the table.
    assert said(done).count("R6 (ranks) at step 8, rank 1, stage parameters: the bits differ from the other ranks'") == 1
    assert num_trained(RunDir(tmp_path / "0")) == 9


def test_a_batch_of_nested_dataclasses_is_proven(tmp_path):
    done = run(tmp_path, *SETTINGS, "nprocs=2", "recipe=boxed")
    assert done.returncode == 0, said(done)
    assert read_sweep(tmp_path).jobs[0].correctness.is_proof


def test_launchers_share_a_reference_and_agree_in_bits(tmp_path):
    done = run(tmp_path, *SETTINGS, "nprocs=2", "launcher=spawn,launch,torchrun")
    assert done.returncode == 0, said(done)
    evidence = [json.loads(RunDir(tmp_path / str(job)).evidence.read_text()) for job in range(3)]
    assert [each["shared_with"] for each in evidence] == ["", *[str(RunDir(tmp_path / "0").evidence)] * 2]
    jobs = read_sweep(tmp_path).jobs
    assert [job.identical_to for job in jobs] == [None, 0, 0]
    assert "R10" not in checks_of(jobs[0])
    for job in jobs[1:]:
        assert checks_of(job)["R10"].status == "passed"
        verified, trained = checks_of(job)["R10"].detail.split("; ")
        number = job.plan.job
        assert verified.startswith(f"the verification of job 0 and that of job {number} left the same digests on 2 ranks")
        assert trained.startswith(f"job 0 and job {number} left the same digests on 2 ranks")


def test_one_rank_trains_the_same_bits_in_this_process_and_in_another(tmp_path):
    done = run(tmp_path, *SETTINGS, "nprocs=1", "launcher=spawn,inline", "compare=off")
    assert done.returncode == 0, said(done)
    assert [job.identical_to for job in read_sweep(tmp_path).jobs] == [None, 0]


def test_an_audit_catches_every_fault_that_applies(tmp_path):
    done = run(tmp_path, *SETTINGS, "nprocs=2", "compare=audit")
    assert done.returncode == 0, said(done)
    data = read_audit(RunDir(tmp_path / "0"))
    rows = {row.fault: row for row in audit_table(trials_of(data))}
    assert rows.keys() | data["left_out"].keys() == {*FAULTS, "none"}
    assert all(row.is_right for row in rows.values())
    assert (rows["none"].red, rows["none"].trials) == (0, 20)


SMALL = {
    "images": "_target_: recipes.se_resnext.SEResNeXt\nwidth: 4\ncardinality: 2\nimage_size: 17\ndropout: 0.1\n",
    "pairs": "_target_: recipes.transformer.Transformer\nnum_layers: 1\nwidth: 16\nfeedforward: 16\nnum_heads: 2\n",
}


@pytest.mark.parametrize("settings", [("recipe=images,pairs", "nprocs=2,3"), ("recipe=images", "nprocs=2", "sync_bn=true")])
def test_shipped_recipes_are_equal_to_one_process(tmp_path, settings):
    recipes = tmp_path / "conf" / "recipe"
    recipes.mkdir(parents=True)
    for name, content in SMALL.items():
        (recipes / f"{name}.yaml").write_text(content)
    done = run(tmp_path, "backend=gloo", "global_batch_size=7", "steps=2", "report=none", *settings)
    assert done.returncode == 0, said(done)
    jobs = read_sweep(tmp_path).jobs
    assert len(jobs) == (1 if "sync_bn=true" in settings else 4)
    for job in jobs:
        assert job.correctness.is_proof, job.correctness.notes()
        # A transformer has no buffers, and draws masks: R11 is about these.
        assert {checks_of(job)[name].status for name in ("R1", "R3", "R4", "R5", "R6", "R8", "R11", "R13")} == {"passed"}


def test_bandwidth_is_measured_by_size_and_a_profiled_job_leaves_one_trace_of_all_ranks(tmp_path):
    small = ("recipe.largest_mib=1", "recipe.repeats=4", "report=none")
    done = run(tmp_path / "bandwidth", "recipe=allreduce", "backend=gloo", "nprocs=2", *small)
    assert done.returncode == 0 and "1 MiB" in said(done), said(done)
    settings = ("steps=6", "precision=float64", "profile=true", "compare=off")
    done = run(tmp_path / "profile", "recipe=points", "backend=gloo", "nprocs=2", *settings)
    assert done.returncode == 0, said(done)
    events = json.loads((tmp_path / "profile" / "0" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event.get("name") == "step 5"} == {0, PROCESSES_OF_A_RANK}

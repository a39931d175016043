"""Settings of DDP: what is refused, what compression is proved to be, and that jobs which differ in them are compared."""

import dataclasses
import math
import types

import pytest
import torch

from harness.compare.correctness.verdict import judge
from harness.entrypoints.repeat import groups
from harness.errors import ConfigError
from harness.report.sweep.build import may_pair, sweep_report
from harness.report.sweep.notes import compressed, notes
from harness.run.folder import RunDir
from harness.run.plan import Ddp, RunPlan
from harness.training import compiling
from harness.training.parallel.comm_hooks import WIRE, comm_hook
from harness.verify.rounding import reduction_ratios
from tests.reports import MACHINE, job_of, plan_of
from tests.test_compare_correctness import green, unchecked


@pytest.mark.parametrize(
    ("ddp", "message"),
    [
        (Ddp(bucket_cap_mb=0), "ddp.bucket_cap_mb=0 must be above 0 MiB."),
        (Ddp(bucket_cap_mb=math.nan), "ddp.bucket_cap_mb=nan must be above 0 MiB."),
        (Ddp(comm_hook="int8"), "ddp.comm_hook=int8 is unknown; use none, fp16, bf16, powersgd."),
        (Ddp(static_graph=True, find_unused_parameters=True), "Use one of them."),
    ],
)
def test_settings_that_cannot_work_are_named(ddp, message):
    (problem,) = plan_of(0, ddp=ddp).train.problems(1)
    assert problem.endswith(message)


def test_the_plan_is_read_back_with_its_settings(tmp_path):
    plan = plan_of(0, ddp=Ddp(static_graph=True, comm_hook="fp16"))
    plan.write(RunDir(tmp_path))
    assert RunPlan.read(RunDir(tmp_path)).train == plan.train


# What a reduction in fewer bits may lose


def reduced_in(dtype, parts):
    """Return what the hook makes of one bucket of each rank, the all-reduce being done here."""
    sent = torch.stack([part.to(dtype).div(len(parts)) for part in parts])
    total = sent[0]
    for part in sent[1:]:
        total = total + part
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("name", WIRE)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_declared_compression_is_within_its_bound_and_close_to_it(name, ranks):
    parts = [torch.randn(20_000, generator=torch.Generator().manual_seed(rank)) * 1e-4 for rank in range(ranks)]
    local, reduced = [{"w": part} for part in parts], {"w": reduced_in(WIRE[name], parts)}
    assert 0.1 < reduction_ratios(local, reduced, WIRE[name])["w"] <= 1
    assert reduction_ratios(local, reduced)["w"] > 1


@pytest.mark.parametrize("name", WIRE)
def test_a_sum_for_a_mean_is_seen_behind_compression(name):
    parts = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    reduced = {"w": 2 * reduced_in(WIRE[name], parts)}
    assert reduction_ratios([{"w": part} for part in parts], reduced, WIRE[name])["w"] > 1


def test_compression_is_no_fault_and_no_proof_either():
    evidence = {
        **green(tier="quick"),
        "comm_hook": "fp16",
        "own_precision": None,
        "not_mathematics": "gradients travel compressed",
    }
    verdict = judge(evidence)
    check = next(check for check in verdict.checks if check.name == "R4")
    assert (verdict.failed, check.status, check.origin) == (None, "passed", "declared")
    assert "within the rounding of ddp.comm_hook=fp16" in check.detail
    assert not verdict.is_proof and verdict.label.startswith("not proven")


def test_a_reduction_without_a_bound_is_not_checked():
    evidence = {
        **green(tier="quick"),
        "comm_hook": "powersgd",
        "own_precision": None,
        "not_mathematics": "gradients travel compressed",
    }
    verdict = judge(evidence)
    assert "ddp.comm_hook=powersgd" in unchecked(verdict)["R4"] and not verdict.is_proof


def test_one_rank_alone_is_proved_by_its_replay():
    assert judge(green(1, "quick")).is_proof


def test_hooks_are_made_anew_for_each_model():
    assert comm_hook("none") is None
    (state, _), (other, _) = (comm_hook("powersgd")() for _ in range(2))
    assert state is not other


# In a sweep


def test_jobs_that_differ_in_how_gradients_are_reduced_are_compared():
    jobs = [job_of(0), job_of(1, ddp=Ddp(bucket_cap_mb=1)), job_of(2, ddp=Ddp(comm_hook="bf16")), job_of(3, compile=True)]
    assert [job.baseline for job in sweep_report("f", jobs, MACHINE).jobs] == [0, 0, 0, 0]
    assert [[job.plan.job for job in group] for group in groups(jobs, aa=False)] == [[0, 1, 2, 3]]
    assert not may_pair(jobs[0].plan, job_of(4, seed=1).plan)


def test_jobs_with_compressed_gradients_are_named():
    jobs = [job_of(n, nprocs=2, ddp=Ddp(comm_hook=hook)) for n, hook in enumerate(("none", "fp16", "fp16", "powersgd"))]
    said = [line for line in notes(sweep_report("f", jobs, MACHINE)) if "compressed" in line]
    assert [line.partition(": g")[0] for line in said] == ["job 1-2: ddp.comm_hook=fp16", "job 3: ddp.comm_hook=powersgd"]
    alone = dataclasses.replace(jobs[1], plan=dataclasses.replace(jobs[1].plan, nprocs=1))
    assert compressed([alone]) == []


def test_without_a_compiler_compiling_is_refused_by_name(monkeypatch):
    def broken(function):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(torch, "_inductor", types.SimpleNamespace(config=types.SimpleNamespace()), raising=False)
    compiling._require_compiler.cache_clear()
    with pytest.raises(ConfigError, match=r"compile=true does not work here \(InvalidCxxCompiler: No working"):
        compiling.compiled(torch.nn.Linear(1, 1))

"""Sweeps for the tests of reports: recorded ones, and ones made up."""

import dataclasses
import math
import random
import shutil
from pathlib import Path

from harness.compare.correctness.verdict import Check, Verdict
from harness.report.sweep.build import sweep_report
from harness.report.sweep.folder import SweepDir
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.run.folder import RunDir, write_json
from harness.run.plan import RunPlan, Task, TrainPlan, Trial
from harness.run.record import Evaluation, Failure, RankResult, RunResult, Step, to_json
from harness.run.visible import visible

RUNS = Path(__file__).parent / "runs"
MACHINE = {"cores": "4", "cpu": "Test CPU", "memory": "8.0 GiB", "torch": "2.13.0"}
WHERE = {"step": 3, "rank": 1, "tensor": "fc.weight"}
RED = Check("R4", "reduction", "failed", 0.5, 1e-6, "theorem", "gradients differ <b>a|b</b>", WHERE)
GREEN = Check("R0", "contract", "passed", None, None, "bits", "all ranks agree")


def recorded(name, tmp_path):
    """Return a copy of a recorded sweep's folder, to be written into."""
    return Path(shutil.copytree(RUNS / name, tmp_path / "outputs" / "2026-11-30" / name))


def steps(rank, nprocs, num=12, base_s=0.01, seed=0, first=0):
    rng = random.Random(seed * 1000 + rank)
    t, made = 100.0, []
    for number in range(first, first + num):
        seconds = base_s * (1 + 0.05 * rng.random())
        t += seconds
        loss = 2.3 * math.exp(-number / 10)
        made.append(Step(number, loss * 32 / nprocs, 32 / nprocs, 0.1, seconds, t))
    return tuple(made)


def result_of(nprocs, num=12, base_s=0.01, seed=0):
    marks = {"code entered": 98.5, "torch imported": 99.0, "group ready": 99.2, "data and model": 99.5, "DDP built": 99.8}
    digests = ({"done": num, "parameters": f"p{nprocs}"},)
    evaluation = Evaluation(num - 1, {"loss": (20.0, 100.0), "accuracy": (90.0, 100.0)})
    common = {"marks": marks, "facts": {"num_steps": num}, "evaluations": (evaluation,), "digests": digests, "status": "ok"}
    ranks = tuple(RankResult(r, 100 + r, steps=steps(r, nprocs, num, base_s, seed), **common) for r in range(nprocs))
    return RunResult("ok", ranks, marks={"called": 98.0, "started": 98.1, "returned": 101.0})


MESSAGE = "rank 1 of 2 failed at step 7: ValueError: bad batch (mine.py:41). Rank 0 was stopped."


def failed_result(nprocs=2, message=MESSAGE):
    trace = "Traceback ...\nValueError: bad <batch> & \x1b[31mred"
    failure = Failure("ValueError", "bad batch", "mine.py:41", trace, False, 99.0)
    ranks = tuple(RankResult(rank, failure=failure if rank == 1 else None) for rank in range(nprocs))
    return RunResult("failed", ranks, message, failed_rank=1, marks={"called": 98.0, "returned": 99.5})


def plan_of(job, method="spawn", nprocs=1, **train):
    recipe = {"_target_": "recipes.mnist.Mnist", "lr": 0.1, "root": None, "betas": [0.9, 0.99]}
    trained = TrainPlan(**{"recipe": recipe, "global_batch_size": 32, "steps": 12, **train})
    return RunPlan(
        Task("train", module="harness.train", name="train"),
        job,
        method,
        nprocs=nprocs,
        backend="gloo",
        backend_reason="auto: no accelerator",
        train=trained,
    )


def job_of(job, method="spawn", nprocs=1, result=None, folder="", overrides=(), **train):
    label = {"recipe": "mnist", "launcher": method, "nprocs": str(nprocs)}
    base_s = {"spawn": 0.01, "launch": 0.0101}.get(method, 0.01) / nprocs**0.8
    result = result or result_of(nprocs, base_s=base_s, seed=job)
    return JobReport(plan_of(job, method, nprocs, **train), folder, result, label, tuple(overrides))


def four_jobs(folder="/tmp/outputs/2026-11-30/04-34-01"):
    made = [(0, "spawn", 1), (1, "launch", 1), (2, "spawn", 2), (3, "launch", 2)]
    return sweep_report(folder, [job_of(n, method, nprocs, folder=f"{folder}/{n}") for n, method, nprocs in made], MACHINE)


def disturbed(result):
    """Return a run in which pages had to be read from the disk."""
    at = {"t": 100.0, "run_delay_s": None, "pressure_s": None, "throttled": 0, "involuntary_switches": 0}
    meters = ({**at, "name": "warm", "major_faults": 0}, {**at, "t": 100.1, "name": "last step", "major_faults": 3})
    return dataclasses.replace(result, ranks=tuple(dataclasses.replace(rank, meters=meters) for rank in result.ranks))


def with_trial(job, number, change):
    """Return the job with the result of one of its launches changed."""
    trials = [(plan, change(result) if i == number else result) for i, (plan, result) in enumerate(job.trials)]
    return dataclasses.replace(job, trials=tuple(trials))


def with_trials(job, factor, pairs=6, start_s=0.0, aa=False, order=2, among=None):
    """Return the job with several launches, each ``factor`` times as long as usual, with little noise; ``start_s`` later."""
    rng = random.Random(job.plan.job)
    trials = []
    for pair in range(pairs):
        base_s = 0.01 * factor * (1 + 0.002 * rng.random())
        plan = dataclasses.replace(job.plan, trial=Trial(order * pair + job.plan.job, pair, aa=aa, among=among))
        result = result_of(job.plan.nprocs, base_s=base_s, seed=pair)
        marks = {**result.marks, "called": result.marks["called"] - start_s}
        trials.append((plan, dataclasses.replace(result, marks=marks)))
    return dataclasses.replace(job, trials=tuple(trials))


def with_verdict(job, *checks):
    return dataclasses.replace(job, correctness=Verdict(tuple(checks)))


def changed(sweep, number, **fields):
    jobs = tuple(dataclasses.replace(job, **visible(fields)) if job.plan.job == number else job for job in sweep.jobs)
    return dataclasses.replace(sweep, jobs=jobs)


def hundred_jobs(folder):
    """Return a sweep of 100 jobs: 2 launchers, 2 rank counts, 25 seeds; one failed, one is red."""
    jobs = []
    for n in range(100):
        method, nprocs, seed = ("spawn", "launch")[n % 2], (1, 2)[n // 2 % 2], n // 4
        overrides = (f"launcher={method}", f"nprocs={nprocs}", f"seed={seed}")
        jobs.append(job_of(n, method, nprocs, folder=f"{folder}/{n}", overrides=overrides, seed=seed))
    jobs[17] = dataclasses.replace(jobs[17], result=failed_result())
    jobs[42] = with_verdict(jobs[42], GREEN, RED)
    return sweep_report(str(folder), jobs, MACHINE)


def written(sweep: SweepReport, report=None):
    """Write a sweep's folder, as if it had run."""
    for job in sweep.jobs:
        run = RunDir(job.folder)
        run.path.mkdir(parents=True, exist_ok=True)
        job.plan.write(run)
        write_json(run.result, to_json(job.result))
    SweepDir(sweep.folder).write([(job, Path(job.folder)) for job in sweep.jobs], sweep.machine, report)
    return Path(sweep.folder)


def events(folder):
    """Return what TensorBoard reads of the one event file in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list(folder.glob("events.out.tfevents.*"))
    assert len(files) == 1, f"one event file in {folder}, not {files}"
    made = EventAccumulator(str(files[0]), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    made.Reload()
    return made


def run_of(folder):
    """Return the same of the run of a job."""
    return events(next(path.parent for path in folder.glob("*/events.out.tfevents.*")))

"""R12: is a training that was interrupted, and went on in new processes, the one that was not? Two short runs tell.

The job's own training is the whole one. Beside it, ranks started the same way take one step, write a checkpoint and leave; new
ones go on from there for as long as the training left digests of every step.
"""

from __future__ import annotations

import dataclasses

from harness.compare.correctness.checks_runs import RESUMES, steps_with_digests, why_not_resumed
from harness.entrypoints.run_job import inner_run, run_job
from harness.run.folder import RunDir
from harness.run.plan import RunPlan
from harness.run.record import RunResult

RESUMED_STEPS = 2
"""How many steps the new ranks take at most; the training has left digests after each of them."""


def is_wanted(plan: RunPlan, run: RunDir, result: RunResult) -> bool:
    """Return True where a job's training has ended well and can be compared with one that was interrupted, as it should."""
    asked = plan.train is not None and plan.train.compare in RESUMES and result.status == "ok"
    return asked and not why_not_resumed(plan, result, run)


def interrupt_and_resume(plan: RunPlan, run: RunDir, result: RunResult) -> None:
    """Interrupt a job's training and have it go on, in folders inside its own."""
    assert plan.train is not None
    # Digests are left from birth on, before the first step that this training takes: one step behind that.
    first = min(steps_with_digests(result)) + 1
    beside = dataclasses.replace(plan.train, compare="off", profile=False, reference=None, save_weights=False)
    train = dataclasses.replace(beside, checkpoint_every=1, stop_after=first)
    begun = dataclasses.replace(plan, train=train)
    if run_job(begun, inner_run(run, run.interrupted)).status != "ok":
        return
    checkpoint = run.interrupted.checkpoint
    train = dataclasses.replace(train, checkpoint_every=0, stop_after=first + RESUMED_STEPS, resume=str(checkpoint))
    if run_job(dataclasses.replace(plan, train=train), inner_run(run, run.resumed)).status == "ok":
        # It has served, and holds the model and its optimizer's state once more.
        checkpoint.unlink(missing_ok=True)

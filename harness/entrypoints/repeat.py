"""Jobs in comparison: those that do the same work in different ways are launched again and again, in ABBA order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from harness.compare.performance.schedule import repeats, schedule
from harness.compare.plans import differences
from harness.entrypoints.run_job import inner_run, run_job
from harness.report.sweep.build import may_pair
from harness.report.sweep.samples import trials_of
from harness.report.sweep.sweep_report import JobReport
from harness.run.folder import RunDir
from harness.run.plan import RunPlan, Trial
from harness.run.record import RunResult


def groups(reports: Sequence[JobReport], aa: bool) -> list[list[JobReport]]:
    """Return the jobs that may be compared launch by launch, group by group.

    Whoever may be paired with a member belongs to its group, and jobs are paired only within one: what is not launched in
    turn makes no pairs.

    Args:
        aa: Whether a launcher is to be compared with itself, so that a job without a counterpart makes a group too.
    """
    linked_groups: list[list[JobReport]] = []
    for report in reports:
        if report.plan.train is None or report.result.status != "ok":
            continue
        if report.plan.overwrites_its_start(RunDir(report.folder)) or done_before(report, reports) is not None:
            # What it went on from is gone, or its launches would be those of another job.
            continue
        linked = [group for group in linked_groups if any(may_pair(member.plan, report.plan) for member in group)]
        # A job that may be paired with members of two groups makes one of them.
        joined = sorted([*chain.from_iterable(linked), report], key=_number)
        linked_groups = sorted(
            [*(group for group in linked_groups if group not in linked), joined], key=lambda group: _number(group[0])
        )
    return [group for group in linked_groups if len(group) > 1 or aa]


def done_before(report: JobReport, reports: Sequence[JobReport]) -> int | None:
    """Return the number of an earlier job whose launches are these: wrapping one rank changes nothing where there are more."""
    plan = report.plan
    for earlier in reports:
        alike = (earlier.plan.method, earlier.plan.start_method) == (plan.method, plan.start_method) and plan.nprocs > 1
        if earlier.plan.job >= plan.job or not alike or earlier.result.status != "ok":
            continue
        if differences(earlier.plan, plan).keys() == {"ddp.wrap_one_rank"}:
            return earlier.plan.job
    return None


def _number(report: JobReport) -> int:
    return report.plan.job


def run_trials(group: Sequence[JobReport], pairs: int, machine: Mapping[str, str], aa: bool = False) -> Iterator[JobReport]:
    """Launch the jobs of a group in turn; yield each with one trial more, after it has ended.

    The jobs' own runs were the pilot. A launch that other processes disturbed has its pair repeated, twice at most over the
    comparison; nothing is dropped.

    Args:
        pairs: How often each job is launched.
        aa: Whether each is compared with itself too, in as many pairs: it is then launched twice as often.
    """
    by_arm = {f"job {report.plan.job}": report for report in group}
    seed = group[0].plan.train.seed if group[0].plan.train else 0
    slots = schedule(2 * pairs if aa else pairs, seed, list(by_arm), pilot=False)
    waiting = list(slots)
    while waiting:
        for slot in waiting:
            report = by_arm[slot.arm]
            # Without a pilot, each launch belongs to a pair.
            assert slot.pair is not None
            trial = Trial(slot.order, slot.pair, slot.replaces, aa, among=_number(group[0]))
            by_arm[slot.arm] = report = dataclasses.replace(report, trials=(*report.trials, _launch(report, trial)))
            yield report
        # Asked again after each round: a pair that is repeated may be disturbed as well.
        waiting = repeats(slots, [launch for report in by_arm.values() for launch in trials_of(report, machine)])
        slots += waiting


def _launch(report: JobReport, trial: Trial) -> tuple[RunPlan, RunResult]:
    assert report.plan.train is not None
    # What the job's own run has proved and left is not paid for again: these launches are for their times.
    train = dataclasses.replace(report.plan.train, compare="off", checkpoint_every=0, profile=False, save_weights=False)
    plan = dataclasses.replace(report.plan, train=train, trial=trial)
    job = RunDir(report.folder)
    return plan, run_job(plan, inner_run(job, job.trial(trial.order)))

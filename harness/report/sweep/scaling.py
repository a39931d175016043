"""How the jobs of a sweep scale over ranks, or what is missing to say so. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.compare.performance.launches import Launch
from harness.compare.performance.scaling import scaling
from harness.errors import NotComparable
from harness.report.sweep.samples import launch_of, launched_in_turn, trials_of, work
from harness.report.sweep.sweep_report import JobReport
from harness.report.sweep.table import settings
from harness.report.sweep.times import step_times


def scaling_sentences(jobs: Sequence[JobReport], machine: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield number and sentence for each job of several ranks that has a counterpart of one rank."""
    done = [job for job in jobs if job.plan.train is not None and job.result.status == "ok" and step_times(job)]
    for job in done:
        counterparts = [
            other
            for other in done
            if job.plan.nprocs > 1 and other.plan.nprocs == 1 and _alike(other, job) and _kind(other, job)
        ]
        # Without a plain process there is nothing to scale from: DDP around one rank has costs of its own.
        plain = next((other for other in counterparts if not _wrapped(other)), None)
        # With the plain one's batch, or the two factors would not multiply.
        single = next(
            (other for other in counterparts if plain and _wrapped(other) and _batch(other) == _batch(plain)),
            None,
        )
        # Wrapping one rank is nothing to several: the job without says the same.
        is_told = _wrapped(job) and any(not _wrapped(other) and _same(other, job) for other in done)
        if plain is not None and not is_told:
            yield job.plan.job, _sentence(plain, single, job, machine)


def _sentence(plain: JobReport, single: JobReport | None, many: JobReport, machine: Mapping[str, str]) -> str:
    arms = [arm for arm in (plain, single, many) if arm is not None]
    launches = _launches(arms, machine)
    try:
        kind = _kind(plain, many)
        assert kind is not None
        return f"{scaling(kind, launches[0], launches[1] if single else None, launches[-1]).sentence}."
    except NotComparable as error:
        return f"no scaling, because {str(error).rstrip('.')}; set it to the same for both."


def _launches(arms: Sequence[JobReport], machine: Mapping[str, str]) -> list[list[Launch]]:
    """Return what was launched in turn, where all arms were and trained what was verified; else the jobs' own runs."""
    orders = [plan.trial.order for arm in arms for plan, _ in arm.trials if plan.trial]
    # Older records do not tell who was launched among whom; there, a number that occurs twice does.
    if launched_in_turn(arms) and not any(arm.strayed for arm in arms) and len(set(orders)) == len(orders):
        return [trials_of(arm, machine) for arm in arms]
    return [[launch_of(arm, machine)] for arm in arms]


def _kind(single: JobReport, many: JobReport) -> Any:
    """Return ``strong`` where the global batch stays, ``weak`` where that of a rank does, else None."""
    return {_batch(single): "strong", many.plan.nprocs * _batch(single): "weak"}.get(_batch(many))


def _batch(job: JobReport) -> int:
    assert job.plan.train is not None
    return job.plan.train.global_batch_size


def _wrapped(job: JobReport) -> bool:
    return job.plan.train is not None and job.plan.train.ddp.wrap_one_rank


def _same(other: JobReport, job: JobReport) -> bool:
    return other.plan.nprocs == job.plan.nprocs and _batch(other) == _batch(job) and _alike(other, job)


def _alike(single: JobReport, many: JobReport) -> bool:
    """Return whether two jobs differ in nothing but number of ranks and batch."""
    work_of_single, work_of_many = work(single), work(many)
    # Which batch suits which kind of scaling is what _kind asks.
    del work_of_single["global_batch_size"], work_of_many["global_batch_size"]
    return (
        work_of_single == work_of_many
        and settings(single)["launcher"] == settings(many)["launcher"]
        and _reduction(single) == _reduction(many)
    )


def _reduction(job: JobReport) -> Any:
    assert job.plan.train is not None
    # Wrapping is what the middle arm is about; all else of DDP has to be the same in all arms.
    return {**vars(job.plan.train.ddp), "wrap_one_rank": None}, job.plan.train.compile

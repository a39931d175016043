"""From Hydra's jobs to runs and back: plan all, launch each, hand rank 0's values to the sweeper."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.compare.plans import may_share_reference
from harness.config import incomplete
from harness.entrypoints import resume
from harness.entrypoints.hydra_compose import Composed, compose, settings_of, write_folder
from harness.entrypoints.hydra_plan import plan_all
from harness.entrypoints.repeat import done_before, groups, run_trials
from harness.entrypoints.run_job import run_job
from harness.errors import ConfigError, HarnessError, unwritable
from harness.launchers import registry
from harness.launchers.signals import Interrupted
from harness.report.reporter import Reporters
from harness.report.sweep.folder import SweepDir, job_report, whole_sweep
from harness.report.sweep.notes import failed_launches
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.run.folder import RunDir, read_value
from harness.run.job import Job, alone_in
from harness.run.machine import machine_facts
from harness.run.plan import Trial
from harness.run.record import RunResult

log = logging.getLogger(__name__)


class JobFailed(CompactHydraException):
    """A job whose failure is one message: what a sweeper of the user's gets, and Hydra prints where nobody else has."""


def launch(
    context: HydraContext, config: DictConfig, function: TaskFunction, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Run the jobs of one batch of a sweep; see :class:`hydra_plugins.harness_launcher.HarnessLauncher`."""
    try:
        return _launch(context, config, function, job_overrides, first)
    except JobFailed as error:
        if not _ends_with_a_failure(config):
            raise
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def _ends_with_a_failure(config: DictConfig) -> bool:
    """Return True where all that is left for Hydra is to tell a failure, with how to get frames that are none of the user's.

    Hydra's own sweeper ends at the first failed job of a batch; others take it for one trial of many.
    """
    # Whoever sets HYDRA_FULL_ERROR asks for the frames.
    return config.hydra.runtime.choices.get("hydra/sweeper") == "basic" and os.environ.get("HYDRA_FULL_ERROR") != "1"


def _launch(
    context: HydraContext, config: DictConfig, function: TaskFunction, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    # As each of Hydra's launchers does first: it registers the resolvers hydra: and now:.
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    if "MASTER_PORT" in os.environ:
        log.info(f"MASTER_PORT={os.environ['MASTER_PORT']} of the environment is not used: each run has a store of its own.")
    # Each job takes this place in turn, and whoever called must find its own there again.
    before = HydraConfig.instance().cfg
    try:
        _refuse_run_dir(config)
        try:
            batch = [compose(context, config, overrides, first + number) for number, overrides in enumerate(job_overrides)]
            jobs = plan_all(batch, function)
        except OmegaConfBaseException as error:
            raise ConfigError(incomplete(error)) from error
        with alone_in(Path(batch[0].config.hydra.sweep.dir)):
            return _run_all(context, function, batch, jobs)
    except HarnessError as error:
        raise JobFailed(str(error)) from error
    except OSError as error:
        raise JobFailed(unwritable(error, config.hydra.sweep.dir)) from error
    except Interrupted as interruption:
        _leave(interruption, SweepDir(config.hydra.sweep.dir))
        raise
    finally:
        HydraConfig.instance().cfg = before


def _refuse_run_dir(config: DictConfig) -> None:
    """Refuse ``hydra.run.dir``, which Hydra reads in single runs alone, unless the user knows that this is none.

    Raises:
        ConfigError: It was given, and no ``--multirun``.
    """
    # As they were typed: an interpolation has its meaning in a job.
    overrides: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    given = [override for override in overrides if override.startswith("hydra.run.dir=")]
    if given and {"-m", "--multirun"}.isdisjoint(sys.argv):
        folder = given[-1].partition("=")[2]
        sentence = f"{given[-1]} names the folder of a single run, and every run is a sweep: use hydra.sweep.dir={folder}."
        raise ConfigError(sentence)


def _run_all(context: HydraContext, function: TaskFunction, batch: list[Composed], jobs: Sequence[Job]) -> list[JobReturn]:
    config, facts = batch[0].config, machine_facts()
    folder, settings = SweepDir(config.hydra.sweep.dir), settings_of(config)
    reporters = Reporters.from_config(settings["report"])
    returns: list[JobReturn] = []
    reports: list[JobReport] = []
    try:
        # Before the first run, so that a sweep that is interrupted can be shown and compared too.
        folder.write([(job, job.run.path) for job in jobs], facts, settings["report"])
        reporters.begin(str(folder.path), jobs)
        for planned in jobs:
            # What a job came to holds its configuration again: kept twice, a long sweep would grow.
            composed = batch.pop(0)
            HydraConfig.instance().set_config(composed.config)
            write_folder(composed)
            # Hydra calls these where it runs a job; here that is the parent, once, and not each rank.
            context.callbacks.on_job_start(config=composed.config, task_function=function)
            job = with_reference(planned, reports)
            result = _run_one(composed, job, reporters)
            if resume.is_wanted(job.plan, job.run, result):
                log.info(f"job {job.plan.job}: its training is interrupted and resumed")
                resume.interrupt_and_resume(job.plan, job.run, result)
            returns.append(_job_return(composed, job, result))
            reports.append(job_report(job.plan, job.run, result, job.label, job.overrides))
            context.callbacks.on_job_end(config=composed.config, job_return=returns[-1])
        # Which jobs may be launched in turn is known only when all have ended well or not.
        reports = with_trials(reports, settings, facts)
        report = whole_sweep(folder, reports)
        reporters.report(report)
        fail_the_red(report, jobs, returns)
        is_red = any(job_return.status == JobStatus.FAILED for job_return in returns)
        if is_red and _ends_with_a_failure(config) and reporters.include_terminal():
            # Which has told it: Hydra would tell it again.
            sys.exit(1)
    finally:
        reporters.close()
    return returns


def fail_the_red(report: SweepReport, jobs: Sequence[Job], returns: Sequence[JobReturn]) -> None:
    """Fail the jobs that were well by themselves, and are not by what came afterwards.

    That is what could be compared only then (training with verification, run with run), and launches for a comparison.
    """
    reports = {job.plan.job: job for job in report.jobs}
    for job, answer in zip(jobs, returns, strict=True):
        problems = _found_late(reports[job.plan.job]) if job.plan.job in reports else []
        if problems and answer.status == JobStatus.COMPLETED:
            answer.status = JobStatus.FAILED
            answer.return_value = JobFailed("\n".join(problems))


def _found_late(job: JobReport) -> list[str]:
    verdict, train = job.correctness, job.plan.train
    red = verdict is not None and verdict.failed is not None and train is not None and train.on_mismatch == "stop"
    failed = failed_launches(job)
    return [*(verdict.sentences() if verdict is not None and red else []), *([failed] if failed else [])]


def with_reference(job: Job, done: Sequence[JobReport]) -> Job:
    """Return the job, with the evidence of an earlier one whose verification may stand for its own."""
    for report in done:
        evidence = RunDir(report.folder).evidence
        if may_share_reference(report.plan, job.plan) and evidence.exists() and job.plan.train is not None:
            train = dataclasses.replace(job.plan.train, reference=str(evidence))
            return dataclasses.replace(job, plan=dataclasses.replace(job.plan, train=train))
    return job


def with_trials(reports: list[JobReport], settings: Mapping[str, Any], facts: Mapping[str, str]) -> list[JobReport]:
    """Return the jobs with the further launches that ``compare.pairs`` asks for."""
    by_job = {report.plan.job: report for report in reports}
    if settings["pairs"] and not groups(reports, settings["aa"]):
        log.info(
            f"compare.pairs={settings['pairs']}: no two jobs do the same work in different ways, so none is launched again. "
            "Try launcher=spawn,launch, or compare.aa=true."
        )
    for report in reports if settings["pairs"] else []:
        if (other := done_before(report, reports)) is not None:
            log.info(f"job {report.plan.job} is not launched again: its launches would be those of job {other}")
    for group in groups(reports, settings["aa"]) if settings["pairs"] else []:
        names = " against ".join(f"job {report.plan.job}" for report in group)
        planned = len(group) * settings["pairs"] * (2 if settings["aa"] else 1)
        for report in run_trials(group, settings["pairs"], facts, settings["aa"]):
            log.info(f"{names}: {_said_of(report.trials[-1][0].trial, planned)} (job {report.plan.job})")
            by_job[report.plan.job] = report
    return list(by_job.values())


def _said_of(trial: Trial | None, planned: int) -> str:
    """Return which launch of a comparison has just ended; those of a repeated pair come on top of what was planned."""
    assert trial is not None
    if trial.replaces is None:
        return f"launch {trial.order + 1} of {planned}"
    return f"launch {trial.order + 1}, pair {trial.replaces} again, which was disturbed or failed"


def _run_one(composed: Composed, job: Job, reporters: Reporters) -> RunResult:
    reporters.started(job)
    result = run_job(job.plan, job.run, reporters)
    # A rank that ran inline, in this process, has left the job's logging behind.
    configure_log(composed.config.hydra.hydra_logging, composed.config.hydra.verbose)
    if result.status != "ok":
        _tell_job_log(composed, result.account)
    reporters.ended(job, result)
    return result


def _tell_job_log(composed: Composed, message: str) -> None:
    """Add the parent's own verdict on a failed job to the job's log."""
    configure_log(composed.config.hydra.job_logging, composed.config.hydra.verbose)
    # The screen has its own message: the log file alone lacks one.
    for handler in list(logging.getLogger().handlers):
        if not isinstance(handler, logging.FileHandler):
            logging.getLogger().removeHandler(handler)
    log.error(message)
    configure_log(composed.config.hydra.hydra_logging, composed.config.hydra.verbose)


def _job_return(composed: Composed, job: Job, result: RunResult) -> JobReturn:
    hydra = DictConfig({"hydra": composed.config.hydra})
    answer = JobReturn(
        overrides=list(OmegaConf.to_container(composed.config.hydra.overrides.task)),  # type: ignore[arg-type]
        cfg=composed.task_config(),
        hydra_cfg=hydra,
        working_dir=str(composed.folder) if composed.config.hydra.job.chdir else os.getcwd(),
        task_name=composed.config.hydra.job.name,
    )
    if result.status == "ok":
        answer.status = JobStatus.COMPLETED
        answer.return_value = read_value(job.run)
    else:
        answer.status = JobStatus.FAILED
        # Hydra raises what stands here when a sweeper asks a failed job for its value.
        answer.return_value = JobFailed(result.account)
    return answer


def _leave(interruption: Interrupted, folder: SweepDir) -> None:
    """End this process as a shell expects of one that a signal has ended; its ranks are gone, what they recorded is not."""
    from harness.report.terminal import shown

    # A second Ctrl-C has nothing left to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = f" What was done is shown by: python -m harness.compare {shlex.quote(shown(folder.path))}"
    sentence = f"\n{interruption}: all ranks were stopped.{done if folder.index.exists() else ''}"
    print(sentence, file=sys.stderr, flush=True)
    registry.close_all()
    sys.exit(128 + interruption.number)

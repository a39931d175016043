"""Which jobs are launched again, in what order, and which pairs are repeated; nothing is started."""

import dataclasses

import pytest

from harness.compare.performance.schedule import EXTRA_PAIRS
from harness.entrypoints import repeat
from harness.entrypoints.hydra_jobs import _said_of
from harness.run.folder import RunDir
from harness.run.plan import Ddp, RunPlan, Trial
from tests.reports import MACHINE, disturbed, failed_result, job_of, result_of


class Launched(list):
    """Plans that were launched; ``results`` says what comes of launch number n."""

    def __init__(self):
        super().__init__()
        self.results = {}


@pytest.fixture
def launched(monkeypatch):
    """Stand in for :func:`run_job`."""
    made = Launched()

    def run_job(plan, run):
        plan.write(run)
        made.append(plan)
        return made.results.get(len(made) - 1) or result_of(plan.nprocs)

    monkeypatch.setattr(repeat, "run_job", run_job)
    return made


def pair_of_jobs(folder):
    return [job_of(0, "spawn", folder=f"{folder}/0", compare="quick"), job_of(1, "launch", folder=f"{folder}/1", compare="off")]


def made(group, pairs=4, aa=False):
    """Return what the jobs of a group are in the end."""
    return list({one.plan.job: one for one in repeat.run_trials(group, pairs, MACHINE, aa)}.values())


def numbers(groups):
    return [[one.plan.job for one in group] for group in groups]


def test_jobs_that_do_the_same_work_make_a_group():
    jobs = [job_of(0), job_of(1, "launch"), job_of(2, nprocs=2), job_of(3, "launch", 2), job_of(4, seed=7), job_of(5, "launch")]
    assert numbers(repeat.groups(jobs, aa=False)) == [[0, 1, 2, 3, 5]]


def test_whoever_may_be_paired_with_a_member_belongs_to_a_group_and_links_two():
    weak = job_of(1, nprocs=2, global_batch_size=64)
    assert numbers(repeat.groups([job_of(0), weak, job_of(2, nprocs=2, global_batch_size=32)], aa=False)) == [[0, 1, 2]]
    far = job_of(0, nprocs=2, global_batch_size=32)
    apart = [far, weak, job_of(3, seed=7), job_of(4, "launch", seed=7)]
    assert numbers(repeat.groups(apart, aa=False)) == [[3, 4]]
    assert numbers(repeat.groups([*apart, job_of(5)], aa=False)) == [[0, 1, 5], [3, 4]]


def test_a_job_without_a_counterpart_is_launched_against_itself_where_that_is_asked_for():
    assert numbers(repeat.groups([job_of(0), job_of(1, seed=7)], aa=True)) == [[0], [1]]


def test_failed_jobs_and_foreign_apps_are_not_launched_again():
    foreign = dataclasses.replace(job_of(1), plan=dataclasses.replace(job_of(1).plan, train=None))
    assert numbers(repeat.groups([job_of(0, result=failed_result()), foreign, job_of(2)], aa=True)) == [[2]]


def test_a_job_whose_launches_would_be_anothers_is_not_launched_again():
    made = [(n, wrap) for n in (1, 2, 4) for wrap in (False, True)]
    jobs = [job_of(i, nprocs=n, ddp=Ddp(wrap_one_rank=wrap)) for i, (n, wrap) in enumerate(made)]
    assert numbers(repeat.groups(jobs, aa=False)) == [[0, 1, 2, 4]]
    assert [repeat.done_before(job, jobs) for job in jobs] == [None, None, None, 2, None, 4]
    assert numbers(repeat.groups([job_of(0), job_of(1)], aa=False)) == [[0, 1]]


def test_progress_tells_which_launch_of_how_many_and_which_repeats_a_pair():
    assert _said_of(Trial(2, 1), 8) == "launch 3 of 8"
    assert _said_of(Trial(8, 4, replaces=1), 8) == "launch 9, pair 1 again, which was disturbed or failed"


def test_launches_come_in_abba_order_unverified_in_folders_of_their_own(launched, tmp_path):
    jobs = made(pair_of_jobs(tmp_path))
    order = [plan.job for plan in launched]
    assert order in ([0, 1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 1, 1, 0, 0, 1])
    assert [(plan.trial.order, plan.trial.pair) for plan in launched] == [(n, n // 2) for n in range(8)]
    assert {(plan.train.compare, plan.train.checkpoint_every) for plan in launched} == {("off", 0)}
    assert {plan.trial.among for plan in launched} == {0}
    assert [len(job.trials) for job in jobs] == [4, 4]
    assert RunPlan.read(RunDir(tmp_path / str(order[3])).trial(3)) == launched[3]


def test_the_configuration_goes_with_each_launch(launched, tmp_path):
    group = pair_of_jobs(tmp_path)
    RunDir(group[0].folder).path.mkdir()
    RunDir(group[0].folder).config.write_bytes(b"config")
    made(group, pairs=1)
    order = next(plan.trial.order for plan in launched if plan.job == 0)
    assert RunDir(group[0].folder).trial(order).config.read_bytes() == b"config"


def test_against_itself_each_job_is_launched_twice_as_often(launched, tmp_path):
    (job,) = made(pair_of_jobs(tmp_path)[:1], pairs=3, aa=True)
    assert len(job.trials) == len(launched) == 6
    assert all(plan.trial.aa for plan in launched)


def test_a_disturbed_pair_is_repeated_in_its_own_order_and_kept(launched, tmp_path):
    launched.results = {2: disturbed(result_of(1))}
    jobs = made(pair_of_jobs(tmp_path))
    assert [plan.job for plan in launched[8:]] == [plan.job for plan in launched[2:4]]
    assert [(p.trial.pair, p.trial.replaces) for p in launched[8:]] == [(4, 1), (4, 1)]
    assert [len(job.trials) for job in jobs] == [5, 5]


def test_repeats_end(launched, tmp_path):
    launched.results = dict.fromkeys(range(100), disturbed(result_of(1)))
    made(pair_of_jobs(tmp_path))
    assert len(launched) == 8 + 2 * EXTRA_PAIRS


def test_a_launch_that_fails_is_kept_and_its_pair_repeated(launched, tmp_path):
    launched.results = {0: failed_result(1)}
    jobs = made(pair_of_jobs(tmp_path))
    assert [p.trial.replaces for p in launched[8:]] == [0, 0]
    assert sorted(result.status for job in jobs for _, result in job.trials).count("failed") == 1

"""Bandwidth by message size, stragglers and exposed communication, as reports show them."""

import dataclasses
from types import SimpleNamespace

import pytest

from harness.report.figures.waiting import communication, exposed_share, straggler_of, waiting, waiting_said
from harness.report.html import sweep_html
from harness.report.markdown import sweep_markdown
from harness.report.sweep.bandwidth_table import bandwidth_table, measured
from harness.report.sweep.build import sweep_report
from harness.report.sweep.notes import notes
from harness.report.terminal import report_lines
from harness.training.parallel.ddp_timing import reducing, reduction, watch
from harness.training.parallel.strategy import StepTimes
from tests.reports import MACHINE, four_jobs, job_of, result_of


def with_facts(job, *bandwidths):
    ranks = [
        dataclasses.replace(r, steps=(), facts={"bandwidth": b}) for r, b in zip(job.result.ranks, bandwidths, strict=True)
    ]
    return dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks)))


def with_compute(job, *compute_s, exposed_s=(0.001, 0.004)):
    ranks = []
    for rank, mine, exposed in zip(job.result.ranks, compute_s, exposed_s, strict=True):
        steps = tuple(dataclasses.replace(step, compute_s=mine, comm_exposed_s=exposed) for step in rank.steps)
        ranks.append(dataclasses.replace(rank, steps=steps))
    return dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks)))


BANDWIDTH = (
    [[1024, [1e-4, 3e-4, 2e-4]], [4194304, [0.01, 0.01, 0.01]]],
    [[1024, [2e-4, 1e-4, 2e-4]], [4194304, [0.02, 0.01, 0.02]]],
)


def test_of_each_repeat_the_slowest_rank_counts():
    assert measured(with_facts(job_of(0, nprocs=2), *BANDWIDTH)) == [(1024, 2e-4), (4194304, 0.02)]


def test_bandwidths_stand_in_all_reports(tmp_path):
    job = dataclasses.replace(with_facts(job_of(0, nprocs=4, result=result_of(2)), *BANDWIDTH), folder=str(tmp_path))
    sweep = sweep_report(str(tmp_path), [job], MACHINE)
    assert bandwidth_table(sweep).rows == (
        ("0", "4", "1 KiB", "200 us", "5.1 MB/s", "7.7 MB/s"),
        ("0", "4", "4 MiB", "20 000 us", "210 MB/s", "315 MB/s"),
    )
    assert "| 4 MiB | 20 000 us |" in sweep_markdown(sweep)
    assert "All-reduce by message size" in sweep_html(sweep)
    assert any("20 000 us" in line for line, _ in report_lines(sweep, 100))
    assert bandwidth_table(four_jobs("f")) is None


def test_a_rank_that_holds_up_the_others_is_named():
    long = job_of(0, nprocs=2, result=result_of(2, num=19))
    sweep = sweep_report("f", [with_compute(long, 0.002, 0.006)], MACHINE)
    (said,) = sweep.remarks[0]
    assert said.startswith("the slowest rank computes 1.50 times as long as the typical one (straggler index); rank 1 is the")
    assert sweep_report("f", [with_compute(long, 0.002, 0.0021)], MACHINE).remarks == {}
    assert sweep_report("f", [with_compute(job_of(0, nprocs=2), 0.002, 0.006)], MACHINE).remarks == {}


@pytest.mark.parametrize(("often", "said"), [(60, []), (80, ["rank 1 is the slowest in 80% of the steps"])])
def test_a_rank_is_named_only_where_it_is_the_slowest_in_more_than_its_share_of_the_steps(often, said):
    ranks = []
    for rank in result_of(2, num=103).ranks:
        slow = [(step.step % 100 < often) == (rank.rank == 1) for step in rank.steps]
        timed = [dataclasses.replace(s, compute_s=0.006 if late else 0.002) for s, late in zip(rank.steps, slow, strict=True)]
        ranks.append(dataclasses.replace(rank, steps=tuple(timed)))
    job = job_of(0, nprocs=2, result=dataclasses.replace(result_of(2), ranks=tuple(ranks)))
    assert [line.rpartition("; ")[2] for line in waiting_said(job)] == said


def test_sizes_of_buckets_have_units_that_show_them():
    job = travelled(with_compute(job_of(0, nprocs=2), 0.002, 0.002), 0.004, 0.003)
    ranks = [
        dataclasses.replace(r, facts={"reduction": {**r.facts["reduction"], "bucket_bytes": [40, 4096, 2**20, 5 * 2**19]}})
        for r in job.result.ranks
    ]
    (said,) = communication([dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks)))])
    assert said.endswith("buckets of 40 B, 4.0 KiB, 1.0, 2.5 MiB).")


def test_bandwidth_of_more_ranks_than_cores_is_said_to_be():
    job = with_facts(job_of(0, nprocs=2), *BANDWIDTH)
    said = "job 0: more ranks than cores take turns: bandwidths there say little of how fast messages travel."
    assert said in notes(sweep_report("f", [job], {**MACHINE, "cores": "1"}))
    assert said not in notes(sweep_report("f", [job], MACHINE))


def test_communication_is_exposed_where_even_the_last_rank_waits():
    job = with_compute(job_of(0, nprocs=2), 0.002, 0.002)
    assert exposed_share(job) == pytest.approx(0.001 / (0.01 / 2**0.8), rel=0.05)
    assert waiting(job)["straggler_index"] == 1.0
    plain = job_of(0, nprocs=2)
    assert (exposed_share(plain), straggler_of(plain)) == (None, None)


def travelled(job, comm_s, overlap_s):
    """Return the job with what DDP logs of its buckets, in each rank."""
    fact = {"bucket_bytes": [2**20, 5 * 2**19], "comm_overlap_s": overlap_s}
    ranks = [
        dataclasses.replace(rank, facts={**rank.facts, "reduction": {**fact, "comm_s": comm_s * (1 + rank.rank)}})
        for rank in job.result.ranks
    ]
    return dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks)))


def test_one_line_says_how_much_communication_is_exposed_how_much_overlaps_and_in_which_buckets():
    job = travelled(with_compute(job_of(0, nprocs=2), 0.002, 0.002), 0.004, 0.003)
    alone = "(job 0; 75% of the reduction overlaps with the backward; buckets of 1.0, 2.5 MiB)."
    share = f"{exposed_share(job):.0%}"
    assert communication([job]) == [f"Communication that nothing hides takes {share} of a step {alone}"]
    assert communication([job]) == [line for line in notes(sweep_report("f", [job], MACHINE)) if "Communication" in line]
    more = with_compute(job_of(1, nprocs=2), 0.002, 0.002, exposed_s=(0.003, 0.003))
    (said,) = communication([job, more])
    assert "up to" in said and said.endswith("of a step (job 1).")
    assert waiting(job)["comm_overlap_share"] == 0.75 and waiting(job)["bucket_bytes"] == [1048576, 2621440]
    assert waiting(more)["comm_overlap_share"] is None and communication([job_of(0)]) == []


def test_buckets_and_overlap_are_taken_from_what_ddp_logs():
    logged = {"bucket_sizes": "32", "avg_backward_comm_time": 4_000_000, "avg_backward_compute_comm_overlap_time": 1_000_000}
    ddp = SimpleNamespace(_get_ddp_logging_data=lambda: logged)
    assert reduction(ddp) == {"bucket_bytes": [32], "comm_s": 0.004, "comm_overlap_s": 0.001}
    logged["rebuilt_bucket_sizes"] = "16, 24"
    assert reduction(ddp)["bucket_bytes"] == [16, 24]
    logged["avg_backward_comm_time"] = -1
    assert reduction(ddp) == reduction(None) == reduction(SimpleNamespace()) == {}


def test_what_ddp_no_longer_measures_is_unknown():
    whole = {"forward_compute_time": 2_000_000, "backward_compute_time": 3_000_000}
    whole |= {"backward_comm_time": 4_000_000, "backward_compute_comm_overlap_time": 1_000_000}

    def logging(times):
        data = SimpleNamespace(ints_map=times)
        return SimpleNamespace(logger=SimpleNamespace(_get_ddp_logging_data=lambda: data))

    assert reducing(logging(whole)) == StepTimes(0.005, 0.003)
    for change in ({"backward_comm_time": -1}, {"forward_compute_time": 0}, {"backward_comm_time": "4 ms"}):
        assert reducing(logging({**whole, **change})) is None
    assert reducing(SimpleNamespace(logger=SimpleNamespace())) is reducing(SimpleNamespace()) is reducing(None) is None
    watch(SimpleNamespace())
    watch(None)

import dataclasses
import io
import math

import pytest
from rich.console import Console

from harness.report.html import sweep_html
from harness.report.jsonfile import sweep_json
from harness.report.junit import sweep_junit
from harness.report.markdown import sweep_markdown
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.bandwidth_table import RECIPE
from harness.report.sweep.build import sweep_report
from harness.report.sweep.notes import failures, how_sure, notes, unproven, unsteady
from harness.report.sweep.text import both_ends, flow, shortened
from harness.report.tensorboard import TensorBoard
from harness.report.terminal import Terminal, headline, report_lines, traceback_of_another
from harness.run.faults import FAULTS
from harness.run.folder import RunDir
from harness.run.job import Job
from harness.run.plan import Ddp
from harness.run.record import Failure, RankResult, RunResult
from harness.run.visible import visible
from tests.reports import (
    GREEN,
    MACHINE,
    RED,
    changed,
    disturbed,
    failed_result,
    four_jobs,
    hundred_jobs,
    job_of,
    plan_of,
    result_of,
    run_of,
    with_trial,
    with_trials,
    with_verdict,
)  # fmt: skip

WIDTHS = range(60, 201)
FOLDER = "outputs/2026-11-30/04-34-01"


def texts(sweep, width):
    return [text for text, _ in report_lines(sweep, width)]


def wide():
    """Return a sweep whose settings have long names and values."""
    sweep = four_jobs(FOLDER)
    long = "recipe.some_setting_with_a_long_name"
    jobs = [dataclasses.replace(job, overrides=(f"{long}={job.plan.job * 10**9}{'x' * 70}",)) for job in sweep.jobs]
    return dataclasses.replace(sweep, jobs=tuple(jobs))


def mixed():
    """Return a sweep with everything that has a sentence of its own."""
    sweep = changed(four_jobs(FOLDER), 3, result=failed_result())
    red = with_verdict(sweep.jobs[1], GREEN, RED)
    return changed(sweep, 1, correctness=red.correctness)


@pytest.mark.parametrize("make", [lambda: four_jobs(FOLDER), wide, mixed, lambda: hundred_jobs(FOLDER)])
def test_no_line_is_wider_than_the_terminal(make):
    sweep = make()
    for width in WIDTHS:
        # A word such as a path is never broken; none here is longer than 60 - 2.
        long = [line for line in texts(sweep, width) if len(line) > width]
        assert long == [], f"at width {width}"


def test_every_job_and_every_number_is_there_at_every_width():
    sweep = four_jobs("outputs/a/b")
    rates = [tables.grouped(times.samples_per_s(job)) for job in sweep.jobs]
    for width in WIDTHS:
        text = "\n".join(texts(sweep, width))
        assert all(rate in text for rate in rates)
        assert text.count("spawn") >= 2 and text.count("launch") >= 2


def test_columns_stand_side_by_side_at_80_and_numbers_end_in_one_column():
    lines = texts(four_jobs("outputs/a/b"), 80)
    head, rows = lines[1], lines[2:6]
    for name in ("nprocs", "first step", " step", "samples/s"):
        end = head.index(f" {name}") + len(name) + 1
        assert all(row[end - 1] != " " and row[end : end + 1] in ("", " ") for row in rows), name


def test_the_wide_table_is_the_one_of_the_specification():
    head, first, *_ = texts(four_jobs("outputs/a/b"), 200)[1:]
    assert head.split() == ["job", "launcher", "nprocs", "first", "step", "step", "samples/s", "speed", "verified"]
    assert "+-" in first and " ms" in first and " s " in first and "baseline" in first and "not checked" in first


def test_warm_up_is_not_counted():
    job = job_of(0)
    slow = [dataclasses.replace(step, seconds=9.0) if step.step < 3 else step for step in job.result.ranks[0].steps]
    rank = dataclasses.replace(job.result.ranks[0], steps=tuple(slow))
    sweep = sweep_report("f", [dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=(rank,)))], MACHINE)
    assert times.step_s(sweep.jobs[0]) == pytest.approx(0.01, rel=0.06)
    assert len(times.step_times(sweep.jobs[0])) == 9


def test_one_launch_claims_nothing_and_says_so():
    sweep = four_jobs("outputs/a/b")
    assert sweep.jobs[2].speed.left_out == 0
    assert tables.speed_cell(sweep.jobs[2]) == f"{1 / sweep.jobs[2].speed.ratio:.2f}x (1 launch: no claim)"
    assert 1.5 < 1 / sweep.jobs[2].speed.ratio < 2.0
    assert any("No claim of speed" in line for line in texts(sweep, 100))


def test_several_launches_claim_what_their_interval_allows():
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.5)]
    sweep = sweep_report("f", jobs, MACHINE)
    assert tables.speed_cell(sweep.jobs[1]) == "1.50x slower"
    assert times.typical_step_s(sweep.jobs[1])[0] == pytest.approx(0.0157, rel=0.05)
    same = sweep_report("f", [jobs[0], with_trials(job_of(1, "launch", 2), 1.0)], MACHINE)
    assert tables.speed_cell(same.jobs[1]) == "equivalent +-10%"


def test_start_up_is_claimed_beside_the_speed_and_how_sure_that_is():
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.0, start_s=3.0)]
    sweep = sweep_report("f", jobs, MACHINE)
    table = tables.sweep_table(sweep)
    assert table.column("start") == ["", "2.49x slower"]
    assert table.column("speed") == ["baseline", "equivalent +-10%"]
    assert "job 1 against job 0, first step: 2.49x slower (95 % interval 2.49 to 2.49, 6 pairs)." in notes(sweep)
    assert "start" not in tables.sweep_table(four_jobs("f")).columns
    unknown = dataclasses.replace(sweep.jobs[1], start=None)
    assert tables.start_cell(unknown) == ""


def test_no_speed_rests_on_launches_that_trained_something_else_than_was_verified():
    def with_other_bits(job, order):
        trials = []
        for plan, result in job.trials:
            other = tuple(dataclasses.replace(r, digests=({"done": 12, "parameters": "other"},)) for r in result.ranks)
            trials.append((plan, dataclasses.replace(result, ranks=other) if plan.trial.order == order else result))
        return dataclasses.replace(job, trials=tuple(trials))

    base, job = with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.5)
    sweep = sweep_report("f", [base, with_other_bits(job, 5)], MACHINE)
    assert (sweep.jobs[1].strayed, tables.speed_cell(sweep.jobs[1]), sweep.jobs[1].start) == ((5,), "not compared", None)
    assert any(line.startswith("job 1: launch 5 of its comparison trained other bits than") for line in notes(sweep))
    assert tables.speed_cell(sweep_report("f", [with_other_bits(base, 2), job], MACHINE).jobs[1]) == "not compared"
    free = replaced(with_other_bits(job, 5), deterministic=False)
    assert sweep_report("f", [replaced(base, deterministic=False), free], MACHINE).jobs[1].speed is not None


def test_a_launch_for_a_comparison_that_failed_is_told_and_its_sweep_is_not_well():
    broken = with_trial(with_trials(job_of(1, "launch"), 1.0, pairs=3), 1, lambda _: failed_result(1, "flaky on purpose"))
    sweep = sweep_report("f", [with_trials(job_of(0), 1.0, pairs=3), broken], MACHINE)
    said = "1 of its 3 launches for the comparison failed (launch 3: flaky on purpose): its pair is left out."
    assert f"job 1: {said}" in notes(sweep) and sweep.jobs[1].speed.pairs == 2
    assert [tables.is_well(job) for job in sweep.jobs] == [True, False] and not sweep_json(sweep)["ok"]
    assert 'errors="1"' in sweep_junit(sweep) and said in sweep_junit(sweep)


def test_only_launches_that_were_in_turn_make_pairs():
    def speed(*among):
        jobs = [
            with_trials(job_of(n, m, 2), 1.0 + 0.5 * n, among=a)
            for (n, m, a) in zip((0, 1), ("spawn", "launch"), among, strict=True)
        ]
        (_, job) = sweep_report("f", jobs, MACHINE).jobs
        return tables.speed_cell(job), job.rival

    assert speed(0, 0) == speed(None, None) == ("1.50x slower", 0)
    assert speed(0, 1) == speed(None, 1) == ("not compared", None)


def test_a_row_rests_on_the_launches_that_nothing_disturbed_else_on_all_and_says_so():
    base, job = with_trials(job_of(0, nprocs=2), 1.0), with_trials(job_of(1, "launch", 2), 1.5)
    for number in range(2, 6):
        job = with_trial(job, number, lambda result: disturbed(result_of(2, base_s=0.1)))
    sweep = sweep_report("f", [base, job], MACHINE)
    assert sweep.jobs[1].clean == (1, 3) and times.step_s(sweep.jobs[1]) == pytest.approx(0.0157, rel=0.02)
    assert tables.speed_cell(sweep.jobs[1]) == "1.50x slower"
    for number in range(2):
        job = with_trial(job, number, disturbed)
    sweep = sweep_report("f", [base, job], MACHINE)
    assert len(times.launches(sweep.jobs[1])) == 6 and times.step_s(sweep.jobs[1]) == pytest.approx(0.1, rel=0.05)
    table = tables.sweep_table(sweep)
    assert [table.column(name)[1][-2:] for name in ("first step", "step")] == [" !", " !"]
    assert not any("!" in cell for cell in table.rows[0])
    what = "of no launch for the comparison is it known that nothing disturbed its steps, so the number is of all of them."
    assert f"! job 1: {what}" in notes(sweep) and not sweep_json(sweep)["jobs"][1]["launches_are_clean"]
    assert tables.speed_cell(sweep.jobs[1]) == tables.speed_cell(sweep.jobs[1], short=True) == "inconclusive"
    alone = sweep_report("f", [base, job_of(1, "launch", 2)], MACHINE)
    assert tables.speed_cell(alone.jobs[1]) == "not compared"


def short(result):
    """Return a run of 0.1 s of measured steps, beside which nobody can tell what others did."""
    at = {"run_delay_s": 0.0, "pressure_s": 0.0, "throttled": 0, "involuntary_switches": 0, "major_faults": 0}
    meters = ({**at, "t": 100.0, "name": "warm"}, {**at, "t": 100.1, "pressure_s": 0.02, "name": "last step"})
    return dataclasses.replace(result, ranks=tuple(dataclasses.replace(rank, meters=meters) for rank in result.ranks))


def test_short_windows_are_called_that_and_their_starts_still_count():
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.0, start_s=3.0)]
    for number in range(6):
        jobs = [with_trial(job, number, short) for job in jobs]
    sweep = sweep_report("f", jobs, MACHINE)
    table = tables.sweep_table(sweep)
    assert (table.column("speed")[1], table.column("start")[1]) == ("cannot tell", "2.49x slower")
    assert [table.column(name)[1].endswith(" !") for name in ("first step", "step")] == [False, True]
    said = " ".join(notes(sweep))
    assert "disturbed during" not in said and "of job 0-1 (such as job 0: too short to tell (0.10 s of measured" in said
    alone = " ".join(notes(sweep_report("f", [dataclasses.replace(job_of(0), result=short(result_of(1)))], MACHINE)))
    assert "its ranks waited (CPU pressure 20.0 %), and it is too short to tell (0.10 s of measured steps; use more)." in alone


def test_a_table_of_launches_says_so_and_what_the_warm_server_took():
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.0), job_of(2, seed=5)]
    late = {**jobs[0].result.marks, "called": 96.0}
    jobs[0] = dataclasses.replace(jobs[0], result=dataclasses.replace(jobs[0].result, marks=late))
    (said,) = (line for line in notes(sweep_report("f", jobs, MACHINE)) if line.startswith("First step"))
    server = "under spawn from a warm server (its own start, for which job 0 waited 2.00 s, once per command, is not included)"
    which = "First step, step and samples/s of job 0-1 are of launches for the comparison, which verify nothing"
    assert said == f"{which}, {server}; those of job 2 are of its own run."
    assert not any(line.startswith("First step") for line in notes(four_jobs("f")))


def test_each_claim_has_its_interval_and_pairs_beside_the_table():
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.5)]
    assert any(line.startswith("job 1 against job 0, step: 1.50x slower (95 % interval 1.5") for line in texts(
        sweep_report("f", jobs, MACHINE), 200
    ))  # fmt: skip


def test_an_injected_fault_is_told_whatever_is_compared():
    sweep = sweep_report("f", [job_of(0, nprocs=2, fault="sum_instead_of_mean"), job_of(1, nprocs=2)], MACHINE)
    said = "Fault sum_instead_of_mean was injected (job 0)."
    assert said in notes(sweep) and said in texts(sweep, 80)
    assert said.replace("_", "\\_") in sweep_markdown(sweep) and said in sweep_html(sweep)


def test_a_trace_is_told_where_it_lies(tmp_path):
    sweep = sweep_report(str(tmp_path), [job_of(0, folder=str(tmp_path / "0"), profile=True)], MACHINE)
    assert not any("perfetto" in line for line in notes(sweep))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "trace.json").write_text("{}")
    said = "What ranks did inside 10 steps: 0/trace.json, in the sweep's folder, for https://ui.perfetto.dev."
    assert said in notes(sweep) and "0/trace.json, in the sweep" in sweep_html(sweep)


def test_what_is_missing_in_a_proof_is_said_in_a_sentence():
    def check(name, status="passed", detail="why not"):
        return dataclasses.replace(GREEN, name=name, title="it", status=status, detail=detail)

    def said(*checks, nprocs=2):
        return unproven([with_verdict(job_of(0, nprocs=nprocs), *checks)])

    half = [check("R3"), check("R4"), check("R5")]
    assert said(*half, check("R7", "not checked")) == ["Not proven (job 0): R7 (it) was not checked: why not."]
    assert said(*half[:2], check("R5", "not checked", "no"), check("R7"), check("R8", "not checked")) == [
        "Not proven (job 0): R5 (it) was not checked: no."
    ]
    assert said(*half, check("R8")) == [] and unproven([job_of(0)]) == []


def test_a_run_that_was_ended_is_not_called_failed():
    chain = [dataclasses.replace(GREEN, name=name) for name in ("R3", "R5", "R8")]
    job = dataclasses.replace(with_verdict(job_of(0, nprocs=2), *chain), result=failed_result(), ended=True)
    sweep = sweep_report("f", [job], MACHINE)
    assert tables.verified_cell(sweep.jobs[0]) == "equal to 1 process: 3 of 3 checks, then ended"
    assert (tables.speed_cell(sweep.jobs[0]), failures(sweep)[0][:12]) == ("ended", "job 0 ended:")


def replaced(job, **train):
    plan = dataclasses.replace(job.plan, train=dataclasses.replace(job.plan.train, **train))
    return dataclasses.replace(job, plan=plan)


def test_launchers_are_told_apart_at_each_number_of_ranks():
    made = [(0, "spawn", 1), (1, "launch", 1), (2, "spawn", 2), (3, "launch", 2)]
    factors = {0: 1.0, 1: 1.0, 2: 0.6, 3: 0.9}
    sweep = sweep_report("f", [with_trials(job_of(n, m, r), factors[n], order=4) for n, m, r in made], MACHINE)
    assert [job.rival for job in sweep.jobs] == [None, 0, None, 2]
    assert [job.baseline for job in sweep.jobs] == [0, 0, 0, 0]
    assert any(line.startswith("job 3 against job 2, step: 1.50x slower") for line in notes(sweep))


def test_scaling_is_said_in_two_factors_or_what_is_missing():
    def said(*jobs, cores="4"):
        remarks = sweep_report("f", jobs, {**MACHINE, "cores": cores}).remarks
        return [said for sentences in remarks.values() for said in sentences]

    one, two = job_of(0), job_of(2, nprocs=2)
    wrapped = job_of(1, ddp=Ddp(wrap_one_rank=True))
    (whole,) = said(one, wrapped, two)
    assert whole.startswith("strong scaling to 2 ranks: efficiency 0.8") and "(plain process to DDP) x " in whole
    assert "one launch each, no interval" in whole
    (part,) = said(one, two)
    assert part.endswith("a job with nprocs=1 ddp.wrap_one_rank=true would tell DDP's own share.")
    (weak,) = said(one, job_of(2, nprocs=2, global_batch_size=64))
    assert weak.startswith("weak scaling to 2 ranks")
    assert said(one, two, cores="1") == ["oversubscribed, scaling not defined."]
    assert said(one, job_of(2, nprocs=2, global_batch_size=48)) == said(two) == []
    threads = dataclasses.replace(two, plan=dataclasses.replace(two.plan, threads=2))
    assert said(one, threads) == [
        "no scaling, because job 2 cannot be compared with job 0: threads is 2 against 1; set it to the same for both.",
    ]
    assert said(one, wrapped, two, job_of(3, nprocs=2, ddp=Ddp(wrap_one_rank=True))) == [whole]
    several = said(*(with_trials(job, factor, order=3) for job, factor in ((one, 1.0), (wrapped, 1.1), (two, 0.6))))
    assert "95 % interval" in several[0] and "6 triples" in several[0]
    (apart,) = said(*(with_trials(job, 1.0, order=3, among=job.plan.job) for job in (one, wrapped, two)))
    assert "one launch each, no interval" in apart


def test_what_a_speed_rests_on_is_said_in_full_and_one_launch_says_how_many_pairs_it_would_take():
    sweep = four_jobs("f")
    sure = how_sure(sweep)
    assert [line.partition(",")[0] for line in sure] == [f"job {n} against job 0" for n in (1, 2, 3)]
    needed = max(job.speed.needed_pairs for job in sweep.jobs[1:])
    assert all("if launches vary as much as steps do, " in line and " against job 0 10." in line for line in sure)
    assert any(f"compare.pairs={needed} would settle 10 %." in line for line in notes(sweep))
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.5)]
    many = dataclasses.replace(sweep.jobs[1].speed, needed_pairs=21)
    said = [line for line in notes(changed(sweep, 1, speed=many)) if line.startswith("*")]
    assert len(said) == 1 and said[0].endswith(" more than 20 pairs would settle 10 %.")
    unlike = sweep_report("f", [job_of(0), job_of(1, num_workers=1)], MACHINE)
    assert [line for line in notes(unlike) if line.startswith("*")] == [said[0].partition(" If launches")[0]]
    first, start = how_sure(sweep_report("f", jobs, MACHINE))
    assert first.startswith("job 1 against job 0, step: 1.50x slower (95 % interval")
    assert start.startswith("job 1 against job 0, first step: ")


def test_a_job_that_is_not_steady_is_said_to_be_with_and_without_a_comparison():
    def drifting(job, factor, num=23):
        (rank,) = result_of(1, num).ranks
        late = [dataclasses.replace(s, seconds=s.seconds * (factor if s.step >= 3 * num // 4 else 1)) for s in rank.steps]
        ranks = (dataclasses.replace(rank, steps=tuple(late)),)
        return dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=ranks))

    (alone,) = (line for line in notes(sweep_report("f", [drifting(job_of(0), 2.0)], MACHINE)) if "steady" in line)
    assert alone.startswith("The step time is not steady in job 0: the last quarter's steps take 2.0")
    (two,) = unsteady([drifting(job_of(0), 0.7), job_of(1), drifting(job_of(2), 2.0)])
    assert two.startswith("The step time is not steady in job 0, 2: ") and two.endswith("as long as the first's (job 2).")
    unlike = with_trials(job_of(0, result=result_of(1, 23)), 1.0, pairs=2)
    unlike = with_trial(unlike, 0, lambda _: drifting(job_of(0), 0.5).result)
    unlike = with_trial(unlike, 1, lambda _: drifting(job_of(0), 1.5).result)
    (both,) = unsteady(sweep_report("f", [unlike], MACHINE).jobs)
    assert "the last quarter's steps take 0.5" in both
    assert unsteady([dataclasses.replace(drifting(job_of(0), 2.0), result=failed_result())]) == []
    fallen = drifting(job_of(0), 2.0)
    assert unsteady([dataclasses.replace(fallen, result=dataclasses.replace(fallen.result, status="failed"))]) == []
    assert unsteady(four_jobs("f").jobs) == unsteady([drifting(job_of(0), 2.0, num=18)]) == []


def test_a_job_held_against_itself_tells_what_the_machine_can_tell_apart():
    said = [line for line in notes(sweep_report("f", [with_trials(job_of(0), 1.0, aa=True)], MACHINE)) if "itself" in line]
    assert [line.partition(":")[0] for line in said] == ["job 0 against itself, step", "job 0 against itself, first step"]
    assert "this machine tells ratios from 1.0" in said[0] and said[0].endswith("3 pairs.")
    assert not any("itself" in line for line in notes(sweep_report("f", [with_trials(job_of(0), 1.0)], MACHINE)))


def test_a_job_held_against_itself_tells_why_nothing_can_be_said():
    few = with_trials(job_of(0), 1.0, pairs=2, aa=True)
    said = notes(sweep_report("f", [few], MACHINE))
    assert "job 0 against itself: nothing can be said, that needs 2 clean pairs, and there is 1." in said
    busy = with_trial(with_trial(few, 0, disturbed), 1, disturbed)
    said = notes(sweep_report("f", [busy], MACHINE))
    assert "job 0 against itself: nothing can be said, 2 of 2 launches were disturbed (3 major page faults)." in said
    assert "job 0: The machine was disturbed while it ran (3 major page faults): its times say little." in said


def test_only_a_job_of_the_same_work_is_called_identical():
    jobs = [job_of(0), replaced(job_of(1, "launch"), seed=1), job_of(2, "launch")]
    assert [job.identical_to for job in sweep_report("f", jobs, MACHINE).jobs] == [None, None, 0]


def test_a_table_of_one_job_has_no_column_for_speed():
    assert "speed" not in tables.sweep_table(sweep_report("f", [job_of(0)], MACHINE)).columns


def test_what_was_proved_is_said():
    sweep = four_jobs("f")
    assert [tables.verified_cell(job) for job in sweep.jobs] == [
        "not checked", "identical to job 0", "not checked", "identical to job 2",
    ]  # fmt: skip
    chain = [dataclasses.replace(GREEN, name=name) for name in ("R3", "R5", "R8")]
    assert tables.verified_cell(with_verdict(job_of(0), GREEN, *chain)) == "equal to 1 process: 4 of 4 checks"
    assert tables.verified_cell(with_verdict(job_of(0), GREEN, GREEN)) == "not proven: 2 of 2 checks"
    red = dataclasses.replace(with_verdict(job_of(0), GREEN, RED), identical_to=0)
    assert tables.verified_cell(red) == "FAILED R4"
    assert tables.verified_cell(dataclasses.replace(job_of(0), result=failed_result())) == "failed, not checked"


def test_failed_jobs_are_named_with_their_message():
    lines = texts(mixed(), 100)
    assert any(line.startswith("job 3 failed: rank 1 of 2 failed at step 7: ValueError: bad batch") for line in lines)
    assert any(line.startswith("job 1: FAILED R4 (reduction) at step 3, rank 1, tensor fc.weight") for line in lines)


def test_the_failure_of_a_single_job_is_told_once_and_again_where_the_report_is_made_again():
    job, sweep = a_job(0), sweep_report("f", [dataclasses.replace(job_of(0), result=failed_result())], MACHINE)

    def act(out):
        out.begin("f", [job])
        out.started(job)
        out.ended(job, failed_result())
        out.report(sweep)

    text, errors = shown(act)
    assert "failed at step 7" in errors and "failed at step 7" not in text
    assert "failed at step 7" in shown(lambda out: out.report(sweep))[0]


def test_the_last_lines_say_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "2026-11-30" / "04-34-01"
    (folder / "0" / "x").mkdir(parents=True)
    (folder / "0" / "x" / "events.out.tfevents.1").touch()
    lines = texts(four_jobs(str(folder)), 200)
    assert lines[-1] == (
        "Repeat without training: python -m harness.compare outputs/2026-11-30/04-34-01      Look: tensorboard --logdir outputs"
    )


def test_a_sweep_over_a_setting_has_a_column_for_it():
    jobs = [job_of(n, overrides=(f"recipe.lr={lr}", "steps=12")) for n, lr in enumerate((0.1, 0.2))]
    table = tables.sweep_table(sweep_report("f", jobs, MACHINE))
    assert table.columns[:4] == ("job", "launcher", "nprocs", "recipe.lr")
    assert table.column("recipe.lr") == ["0.1", "0.2"]


def test_settings_that_leave_the_work_as_it_is_share_a_baseline_and_others_do_not():
    jobs = [job_of(0), job_of(1, num_workers=2), job_of(2, seed=5), job_of(3, global_batch_size=64)]
    assert [job.baseline for job in sweep_report("f", jobs, MACHINE).jobs] == [0, 0, 2, 3]


# A foreign app


def foreign(*results):
    jobs = [dataclasses.replace(job_of(n, nprocs=2), result=r, label={}) for n, r in enumerate(results)]
    return sweep_report("f", [dataclasses.replace(j, plan=dataclasses.replace(j.plan, train=None)) for j in jobs], MACHINE)


def test_a_single_job_on_a_busy_machine_says_so(tmp_path):
    result = result_of(1)
    ranks = tuple(dataclasses.replace(rank, meters=busy_meters()) for rank in result.ranks)
    sweep = sweep_report("/tmp/x", [job_of(0, result=dataclasses.replace(result, ranks=ranks))], MACHINE)
    said = " ".join(" ".join(text for text, _ in report_lines(sweep, 80)).split())
    what = "run-delay 60.0 % beside others on 0.90 cores"
    assert f"job 0: The machine was disturbed while it ran ({what}): its times say little." in said


def busy_meters():
    counts = {"pressure_s": None, "throttled": 0, "involuntary_switches": 0, "major_faults": 0}
    at = {**counts, "run_delay_s": 0.0, "cpu_s": 0.0, "busy_s": 0.0}
    return ({**at, "t": 100.0, "name": "warm"}, {**at, "t": 101.0, "run_delay_s": 0.6, "busy_s": 0.9, "name": "last step"})


def test_a_failed_job_has_no_speed():
    job = job_of(0, result=dataclasses.replace(result_of(1), status="failed", message="it hung"))
    assert math.isnan(times.samples_per_s(job)) and tables.step_cells([job]) == [""]


def test_a_foreign_app_of_one_job_gets_no_table():
    assert texts(foreign(result_of_foreign()), 80) == []


def test_a_foreign_app_of_more_jobs_gets_a_short_one():
    lines = texts(foreign(result_of_foreign(), failed_result()), 80)
    assert lines == ["job  ranks  status    time", "  0      2  ok      3.00 s", "  1      2  failed  1.50 s"]


def result_of_foreign():
    return dataclasses.replace(job_of(0).result)


# While it runs


def shown(act, width=80, terminal=False, color=None):
    stream, errors = io.StringIO(), io.StringIO()
    fixed = {"width": width, "force_terminal": terminal, "highlight": False, "markup": False, "emoji": False}
    out = Terminal(Console(file=stream, color_system=color, legacy_windows=False, **fixed), Console(file=errors, **fixed))
    act(out)
    return stream.getvalue(), errors.getvalue()


def a_job(number=0, method="spawn", nprocs=2, **train):
    plan = plan_of(number, method, nprocs, **train)
    label = {"recipe": "mnist", "launcher": method, "nprocs": str(nprocs)}
    return Job(plan, RunDir(f"outputs/a/b/{number}"), (), label)


def play(out, job, num=12):
    """Let a job run, step by step, and print between."""
    result = job_of(job.plan.job, job.plan.method, job.plan.nprocs).result
    out.started(job)
    for number in range(num):
        for rank in result.ranks:
            out.event(rank.rank, {"event": "step", **vars(rank.steps[number])})
        out.output(f"[rank 0] line {number} with [brackets] and :smile:")
    out.event(1, {"event": "log", "level": "WARNING", "text": "[rank 1] careful"})
    out.event(0, {"event": "evaluation", "step": 11, "metrics": {"accuracy": [90.0, 100.0]}})
    out.ended(job, result)


def test_the_header_says_what_jobs_have_in_common_and_where_they_lie():
    text, _ = shown(lambda out: out.begin("outputs/a/b", [a_job()]), width=120)
    assert text.startswith("mnist  global batch 32  12 steps  seed 0  gloo (auto: no accelerator)")
    assert text.endswith("outputs/a/b\n") and len(text.splitlines()) == 1 and len(text) == 121


def test_the_header_of_a_job_that_trains_nothing_tells_no_batch_and_no_length():
    job = a_job(recipe={"_target_": RECIPE})
    assert headline([dataclasses.replace(job, label={"recipe": "allreduce"})]) == [
        *("allreduce", "seed 0", "gloo (auto: no accelerator)"),
    ]


def test_the_header_leaves_out_what_is_swept():
    text, _ = shown(lambda out: out.begin("outputs/a/b", [a_job(0), a_job(1, seed=1)]), width=120)
    assert "seed" not in text and "12 steps" in text


def test_in_a_pipe_there_are_lines_and_rank_0_and_logs_are_verbatim():
    text, _ = shown(lambda out: (out.begin("outputs/a/b", [a_job()]), play(out, a_job())))
    assert "\x1b" not in text
    lines = text.splitlines()
    assert "[rank 0] line 3 with [brackets] and :smile:" in lines
    assert "[rank 1] careful" in lines
    stepped = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in stepped] == ["10", "12"]
    assert stepped[0].startswith("step 10 of 12  loss 0.9351  ") and stepped[0].endswith(" samples/s")
    assert "evaluation after step 12  accuracy 0.9" in lines


def test_an_evaluation_comes_after_its_step():
    def act(out):
        job = a_job()
        steps = job_of(0, "spawn", 2).result.ranks[0].steps
        out.started(job)
        for rank, number in [(0, 9), (1, 8), (0, 8), (1, 9)]:
            if (rank, number) == (1, 9):
                out.event(0, {"event": "evaluation", "step": 9, "metrics": {"accuracy": [90.0, 100.0]}})
            out.event(rank, {"event": "step", **vars(steps[number])})
        out.event(0, {"event": "evaluation", "step": 11, "metrics": {"accuracy": [80.0, 100.0]}})
        out.close()

    text, _ = shown(act)
    first, *rest = text.splitlines()
    assert first.startswith("step 10 of 12")
    assert rest == ["evaluation after step 10  accuracy 0.9", "evaluation after step 12  accuracy 0.8"]


def test_a_long_line_of_a_rank_is_not_broken():
    line = "word [red]x[/red] :smile: " * 20
    text, _ = shown(lambda out: out.output(line), width=60)
    assert text == line + "\n"


def test_the_loss_that_is_shown_is_that_of_all_ranks():
    job = a_job(log_every=1)

    def act(out):
        out.started(job)
        for rank, total in ((0, 10.0), (1, 30.0)):
            event = {"event": "step", "step": 0, "loss_sum": total, "count": 10.0 * (rank + 1), "seconds": 0.1}
            out.event(rank, event)

    assert "loss 1.3333" in shown(act)[0]


def uneven(folder):
    """Return a job of 2 ranks whose steps train 200 and 56 samples in turn, in 20 and 8 ms."""
    job = job_of(0, nprocs=2, global_batch_size=200, folder=folder)
    changes = [{"samples": 100, "seconds": 0.020}, {"samples": 28, "seconds": 0.008}]
    ranks = [
        dataclasses.replace(r, steps=tuple(dataclasses.replace(s, **changes[s.step % 2]) for s in r.steps))
        for r in job.result.ranks
    ]
    return dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks)))


def test_samples_that_were_trained_are_counted_in_table_terminal_and_tensorboard(tmp_path):
    job = uneven(str(tmp_path / "0"))
    expected = 256 / 0.028
    assert times.samples_per_s(dataclasses.replace(job, plan=plan_of(0, nprocs=2, warmup_steps=2))) == pytest.approx(expected)

    def act(out):
        out.started(a_job(global_batch_size=200))
        for number in range(12):
            for rank in job.result.ranks:
                out.event(rank.rank, {"event": "step", **vars(rank.steps[number])})

    (last,) = (line for line in shown(act)[0].splitlines() if line.startswith("step 12"))
    assert last.endswith(f"{tables.grouped(expected)} samples/s")
    TensorBoard().report(sweep_report(str(tmp_path), [job], MACHINE))
    rates = [event.value for event in run_of(tmp_path / "0").Scalars("perf/samples_per_s")]
    assert rates == [pytest.approx(rate) for rate in (200 / 0.020, 56 / 0.008) * 6]


def test_a_step_that_was_left_out_is_said_to_be_while_it_runs_and_at_the_end():
    job = job_of(0, nprocs=2)
    bad = {4, 11}
    ranks = []
    for rank in job.result.ranks:
        steps = (dataclasses.replace(s, skipped=True, loss_sum=math.nan) if s.step in bad else s for s in rank.steps)
        ranks.append(dataclasses.replace(rank, steps=tuple(steps)))
    result = dataclasses.replace(job.result, ranks=tuple(ranks))

    def act(out):
        out.started(a_job())
        for number in range(12):
            for rank in result.ranks:
                out.event(rank.rank, {"event": "step", **vars(rank.steps[number])})

    (last,) = (line for line in shown(act)[0].splitlines() if line.startswith("step 12"))
    assert last.startswith("step 12 of 12  loss nan, left out  ")
    said = notes(sweep_report("f", [dataclasses.replace(job, result=result)], MACHINE))
    what = "2 of 12 steps were left out because a loss was not finite, the first is step 4 (counted from 0)."
    assert f"job 0: {what}" in said


def test_what_an_audit_says_fits_the_terminal():
    longest = max(FAULTS, key=len)
    event = {"event": "trial", "number": 12, "total": 46, "fault": longest, "ran": True, "fired": "R3", "step": 1}
    text, _ = shown(lambda out: (out.started(a_job()), out.event(0, event)), width=60)
    assert text.startswith("audit 12 of 46  ") and all(len(line) <= 60 for line in text.splitlines())


def test_on_a_terminal_there_is_a_bar_and_it_goes_away():
    text, _ = shown(lambda out: (out.begin("outputs/a/b", [a_job()]), play(out, a_job())), terminal=True, color="standard")
    assert "12/12" in text and "━" in text and "loss 0." in text
    assert "step 10 of 12" not in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_bar_fits_the_terminal(width):
    text, _ = shown(lambda out: play(out, a_job()), width=width, terminal=True)
    bars = [line for line in text.replace("\r", "\n").splitlines() if "━" in line]
    clean = [line.replace("\x1b[2K", "").replace("\x1b[?25l", "").replace("\x1b[1A", "") for line in bars]
    assert clean and all(len(line) <= width for line in clean)
    assert all("samples/s" in line for line in clean)


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    out = Terminal(Console(file=stream, force_terminal=True, width=80, highlight=False, markup=False))
    out.report(mixed())
    assert "\x1b[3" not in stream.getvalue() and "FAILED R4" in stream.getvalue()
    monkeypatch.delenv("NO_COLOR")
    colored = io.StringIO()
    Terminal(Console(file=colored, force_terminal=True, color_system="standard", width=80)).report(mixed())
    assert "\x1b[31m" in colored.getvalue()


def test_a_failure_is_shown_when_it_happens_on_stderr():
    jobs = [a_job(0), a_job(1)]

    def act(out):
        out.begin("outputs/a/b", jobs)
        out.started(jobs[0])
        out.ended(jobs[0], visible(failed_result()))

    text, errors = shown(act)
    *traceback, told = errors.splitlines()
    assert told.startswith("job 0 failed: rank 1 of 2 failed at step 7")
    assert traceback == ["[rank 1] Traceback ...", r"[rank 1] ValueError: bad <batch> & \x1b[31mred"]
    assert "failed at step 7" not in text


def test_a_sweeper_that_brings_jobs_in_batches_gets_a_table_for_each():
    sweep = four_jobs("outputs/a/b")
    jobs = [a_job(3, "launch", 2)]
    text, _ = shown(lambda out: (out.begin("outputs/a/b", jobs), out.report(sweep)))
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.split()[0].isdigit()] == ["3"]


def test_an_inline_rank_has_the_terminal_for_itself():
    text, _ = shown(lambda out: out.started(a_job(method="inline", nprocs=1)), terminal=True)
    assert text == ""


# Pieces


def test_both_ends_meet_or_part():
    assert both_ends("left", "right", 20) == ["left           right"]
    assert both_ends("aa  bb  cc", "right", 10) == ["aa  bb  cc", "right"]


def test_flow_fills_lines_and_shortens_what_is_too_long():
    assert flow(["aaaa", "bbbb", "cccc"], 10) == ["aaaa  bbbb", "cccc"]
    assert flow(["x" * 50], 20) == [shortened("x" * 50, 20)]
    assert len(shortened("x" * 50, 20)) == 20 and "..." in shortened("x" * 50, 20)


@pytest.mark.parametrize(
    ("numbers", "text"), [([0, 1, 2, 3, 5], "0-3, 5"), ([7], "7"), ([1, 0], "0-1"), ([0, 2, 4], "0, 2, 4")]
)
def test_ranges(numbers, text):
    assert tables.ranges(numbers) == text


def test_times_of_a_column_have_one_unit():
    assert tables.in_unit([0.31, 2.94], 1.0, "s") == ["0.31 s", "2.94 s"]
    assert tables.unit_of_time([0.007, 0.2]) == (1e3, "ms")
    assert tables.unit_of_time([3.0]) == (1.0, "s")
    assert tables.grouped(15960) == "15 960"


def test_a_sweep_in_the_current_folder_is_looked_at_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events = tmp_path / "0" / "name" / "events.out.tfevents.1"
    events.parent.mkdir(parents=True)
    events.touch()
    sweep = sweep_report(str(tmp_path), [job_of(0, folder=str(tmp_path / "0"))], MACHINE)
    assert "Look: tensorboard --logdir ." in [text for text, _ in report_lines(sweep, 80)]


@pytest.mark.parametrize(
    ("rank", "mistake", "shown"),
    [(1, False, ["[rank 1] Traceback", "[rank 1] KeyError: 'x'"]), (0, False, []), (1, True, [])],
)
def test_the_traceback_of_the_rank_that_failed_is_shown_unless_it_has_been_seen(rank, mistake, shown):
    failure = Failure("KeyError", "'x'", "mine.py:3", "Traceback\nKeyError: 'x'\n", False, 1.0, mistake)
    lost = Failure("RuntimeError", "Connection closed by peer", "", "Traceback\nConnection closed\n", True, 2.0)
    ranks = tuple(RankResult(number, failure=failure if number == rank else lost) for number in range(2))
    assert traceback_of_another(RunResult("failed", ranks, failed_rank=rank)) == shown

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ConfigError, NotComparable
from harness.report.html import sweep_html
from harness.report.rebuild import main
from harness.report.reporter import Reporters
from harness.report.sweep import table as tables
from harness.report.sweep.against import against, against_table
from harness.report.sweep.build import sweep_report
from harness.report.sweep.folder import SweepDir, find_sweeps, read_sweep, whole_sweep
from harness.report.sweep.samples import launch_of
from harness.report.terminal import Terminal
from harness.run.folder import RunDir, write_json
from harness.run.job import Job
from harness.run.machine import machine_facts
from harness.run.plan import Ddp
from harness.run.record import FORMAT, to_json
from tests.reports import MACHINE, changed, failed_result, four_jobs, job_of, recorded, result_of, with_trials, written

FILES = {"report.html", "report.md", "report.json", "junit.xml"}


# From a folder


def test_a_sweep_is_read_back_as_it_was(tmp_path):
    sweep = four_jobs(str(tmp_path / "sweep"))
    read = read_sweep(written(sweep))
    assert read.jobs == sweep.jobs
    assert read.machine == sweep.machine and read.clock_offset_s is not None


def test_recorded_sweeps_are_read(tmp_path):
    sweep = read_sweep(recorded("four_jobs", tmp_path))
    assert [tables.settings(job)["launcher"] for job in sweep.jobs] == ["spawn", "spawn", "launch", "launch"]
    assert [job.identical_to for job in sweep.jobs] == [None, None, 0, 1]
    assert [job.baseline for job in sweep.jobs] == [0, 0, 0, 0]
    assert sweep.jobs[1].correctness.num_passed == sweep.jobs[1].correctness.num_checked == 11


def test_a_run_whose_parent_was_killed_is_read_from_its_ranks(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    RunDir(folder / "1").result.unlink()
    sweep = read_sweep(folder)
    assert sweep.jobs[1].result.status == "failed" and "ended before it was judged" in sweep.jobs[1].result.message
    assert len(sweep.jobs[1].result.losses()) == 16
    assert tables.verified_cell(sweep.jobs[1]) == "equal to 1 process: 10 of 10 checks, then ended"
    assert tables.speed_cell(sweep.jobs[1]) == "ended"


def test_a_folder_without_an_index_is_read_all_the_same(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    SweepDir(folder).index.unlink()
    sweep = read_sweep(folder)
    assert [tables.settings(job)["launcher"] for job in sweep.jobs] == ["spawn", "spawn", "launch", "launch"]


def test_sweeps_are_found_above_and_below(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    recorded("one_failed", tmp_path)
    assert [path.name for path in find_sweeps(folder.parent)] == ["four_jobs", "one_failed"]
    assert find_sweeps(folder) == find_sweeps(folder / "2") == [folder]


def test_what_is_no_sweep_is_refused_by_name(tmp_path):
    with pytest.raises(NotComparable, match=r"holds no run: there is no plan\.json in it"):
        read_sweep(tmp_path)


def test_records_of_another_version_are_refused_by_name(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    plan = json.loads(RunDir(folder / "0").plan.read_text())
    del plan["task"]
    RunDir(folder / "0").plan.write_text(json.dumps(plan))
    with pytest.raises(NotComparable, match=r"four_jobs/0 cannot be read: its files are damaged, or another version of"):
        read_sweep(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [("0/evidence.json", '{"steps": ['), ("0/evidence.json", "{}"), ("0/result.json", "[]"), ("sweep.json", "{}")],
)
def test_a_damaged_file_is_named_and_prevents_no_other_report(name, content, tmp_path, capsys):
    folder, sound = recorded("four_jobs", tmp_path), recorded("one_failed", tmp_path)
    (folder / name).write_text(content)
    assert main(["--table-only", str(folder), str(sound)]) == 1
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1 and "cannot be read: it" in said.err
    assert f"{sound.name}" in said.out


@pytest.mark.parametrize("ranks", [10**9, 1e9, -1, "two"])
def test_a_number_of_ranks_that_none_can_have_is_refused(ranks, tmp_path, capsys):
    folder = recorded("four_jobs", tmp_path)
    (folder / "1" / "result.json").unlink()
    write_json(folder / "1" / "plan.json", {**json.loads((folder / "1" / "plan.json").read_text()), "nprocs": ranks})
    assert main([str(folder), "--table-only"]) == 1
    assert f"{ranks} is no number of ranks" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff\xfe" * 100_000, b"[" * 100_000], ids=["binary", "nested"])
def test_a_file_that_is_no_record_is_refused_without_showing_it(content, tmp_path, capsys):
    folder = recorded("four_jobs", tmp_path)
    (folder / "1" / "result.json").write_bytes(content)
    assert main([str(folder), "--table-only"]) == 1
    message = capsys.readouterr().err
    assert "cannot be read" in message and len(message.splitlines()) == 1 and len(message) < 600


def test_a_link_is_no_picture(tmp_path):
    folder, secret = recorded("four_jobs", tmp_path), tmp_path / "secret"
    secret.write_text("<svg>secret</svg>")
    (folder / "pictures").mkdir(exist_ok=True)
    write_json(folder / "pictures" / "index.json", [{"name": "loss", "title": "Loss", "alt": "Loss"}])
    for name in ("loss.svg", "loss.png"):
        (folder / "pictures" / name).unlink(missing_ok=True)
        (folder / "pictures" / name).symlink_to(secret)
    assert "secret" not in sweep_html(read_sweep(folder)).replace(str(tmp_path), "")


@pytest.mark.parametrize("name", ["sweep.json", "1/plan.json", "1/result.json", "1/evidence.json", "1/audit.json"])
def test_records_of_a_newer_format_are_refused_in_a_sentence(name, tmp_path, capsys):
    folder = recorded("four_jobs", tmp_path)
    path = folder / name
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, "format": FORMAT + 1}))
    assert main([str(folder)]) == 1
    assert capsys.readouterr().err == f"{path} has format {FORMAT + 1}, and this harness reads up to {FORMAT}: update it.\n"


def test_batches_of_one_sweep_are_joined_and_a_new_sweep_begins_anew(tmp_path):
    folder = SweepDir(tmp_path)
    written(dataclasses.replace(four_jobs(str(tmp_path)), jobs=four_jobs(str(tmp_path)).jobs[:2]))
    later = [dataclasses.replace(job, speed=None, baseline=None) for job in four_jobs(str(tmp_path)).jobs[2:]]
    folder.write([(job, RunDir(job.folder).path) for job in later], MACHINE)
    assert [job.plan.job for job in whole_sweep(folder, later).jobs] == [0, 1, 2, 3]
    first = job_of(0, folder=str(tmp_path / "0"))
    folder.write([(first, RunDir(first.folder).path)], MACHINE)
    assert [entry["job"] for entry in folder.read()["jobs"]] == [0]


# Who is compared with whom


def test_the_baseline_is_the_first_job_that_worked():
    jobs = [job_of(0, result=failed_result()), job_of(1, "launch"), job_of(2, "torchrun")]
    assert [job.baseline for job in sweep_report("f", jobs, MACHINE).jobs] == [None, 1, 1]


def test_digests_of_birth_alone_make_no_twins():
    ranks = [dataclasses.replace(rank, digests=({"done": 0, "parameters": "p"},)) for rank in result_of(1).ranks]
    result = dataclasses.replace(result_of(1), ranks=tuple(ranks))
    jobs = [job_of(0, result=result), job_of(1, "launch", result=result)]
    assert [job.identical_to for job in sweep_report("f", jobs, MACHINE).jobs] == [None, None]


def test_one_bit_is_a_difference():
    other = result_of(1)
    rank = dataclasses.replace(other.ranks[0], digests=({"done": 12, "parameters": "p1'"},))
    jobs = [job_of(0), job_of(1, "launch", result=dataclasses.replace(other, ranks=(rank,)))]
    assert sweep_report("f", jobs, MACHINE).jobs[1].identical_to is None


def test_the_proof_is_no_part_of_starting():
    job = four_jobs("f").jobs[2]
    ranks = [dataclasses.replace(r, marks={**r.marks, "verified": 99.5 + 0.1 * (1 + r.rank)}) for r in job.result.ranks]
    proved = dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks)))
    assert launch_of(proved, MACHINE).start_s == pytest.approx(launch_of(job, MACHINE).start_s - 0.2)


def test_a_run_as_numbers_to_compare():
    job = four_jobs("f").jobs[2]
    launch = launch_of(job, MACHINE)
    assert launch.start_s == pytest.approx(job.result.first_step_s())
    assert launch.step_s == tuple(job.result.step_seconds()[3:])
    assert (launch.nprocs, launch.samples_per_step, launch.cores, launch.arm) == (2, 32, 4, "job 2")


def test_what_disturbed_a_recorded_run_is_taken_over(tmp_path):
    launch = launch_of(read_sweep(recorded("four_jobs", tmp_path)).jobs[1], MACHINE)
    assert len(launch.step_delay_s) == len(launch.step_s) == 13
    assert launch.run_delay_s > 0 and 0 < launch.cpu_pressure <= 1 and launch.wall_s > sum(launch.step_s) / 2


def test_what_no_rank_used_others_did():
    job = four_jobs("f").jobs[2]
    at = {"run_delay_s": 0.0, "pressure_s": 0.0, "throttled": 0, "major_faults": 0, "involuntary_switches": 0}
    warm = {**at, "name": "warm", "t": 100.0, "cpu_s": 1.0, "busy_s": 50.0}
    ended = [{**warm, "name": "last step", "t": 102.0, "cpu_s": 1.0 + cpu_s, "busy_s": 53.5} for cpu_s in (1.9, 1.2)]
    ranks = [dataclasses.replace(r, meters=(warm, end)) for r, end in zip(job.result.ranks, ended, strict=True)]
    seen = launch_of(dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks))), MACHINE)
    assert seen.others_s == pytest.approx(3.5 - 1.9 - 1.2) and seen.others == pytest.approx(0.2) and not seen.quiet


@pytest.mark.parametrize(
    ("wall_s", "busy_s", "others_s"),
    [(2.0, 3.0, 0.0), (2.0, 2.95, 0.0), (2.0, 1.5, None), (0.2, 4.0, None)],
    ids=["all their own", "a little less, by rounding", "ranks bound to different cores", "too short"],
)
def test_where_sums_do_not_fit_what_others_did_is_unknown(wall_s, busy_s, others_s):
    job = four_jobs("f").jobs[2]
    warm = {"name": "warm", "t": 100.0, "cpu_s": 0.0, "busy_s": 50.0}
    end = {"name": "last step", "t": 100.0 + wall_s, "cpu_s": 1.5, "busy_s": 50.0 + busy_s}
    ranks = tuple(dataclasses.replace(rank, meters=(warm, end)) for rank in job.result.ranks)
    seen = launch_of(dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=ranks)), MACHINE)
    assert seen.others_s == others_s


# harness.compare


def test_all_reports_are_made_again_without_torch(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    code = (
        "import sys; from harness.report.rebuild import main\n"
        f"status = main([{str(folder)!r}]); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} >= FILES | {"pictures"}
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 5
    assert "identical to job 0" in done.stdout and done.stderr == ""


def test_the_status_is_1_for_a_failed_job_and_for_a_red_verdict(tmp_path, capsys):
    assert main([str(recorded("four_jobs", tmp_path)), "--table-only"]) == 0
    assert main([str(recorded("one_failed", tmp_path)), "--table-only"]) == 1
    folder = recorded("four_jobs", tmp_path / "red")
    evidence = json.loads(RunDir(folder / "1").evidence.read_text())
    spoil(evidence)
    RunDir(folder / "1").evidence.write_text(json.dumps(evidence))
    assert main([str(folder), "--table-only"]) == 1
    assert "FAILED R" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [True, False])
def test_the_status_is_1_where_a_launch_for_a_comparison_failed_or_was_interrupted(broken, tmp_path, capsys):
    job = job_of(0, folder=str(tmp_path / "0"))
    written(sweep_report(str(tmp_path), [job], MACHINE))
    for plan, result in with_trials(job, 1.0, pairs=2).trials:
        trial = RunDir(job.folder).trial(plan.trial.order)
        trial.path.mkdir(parents=True)
        plan.write(trial)
        if not (broken and plan.trial.order):
            write_json(trial.result, to_json(result))
    assert main([str(tmp_path), "--table-only"]) == int(broken)
    said = " ".join(capsys.readouterr().out.split())
    assert ("1 of its 2 launches for the comparison failed (launch 2: the run was ended" in said) == broken


def spoil(evidence):
    """Change one digest of one rank's parameters at birth."""
    birth = evidence["birth"]
    first = birth[1] if isinstance(birth, list) else birth["1"]
    name = next(iter(first))
    if isinstance(first[name], dict):
        first[name][next(iter(first[name]))] = "spoilt"
    else:
        first[name] = "spoilt"


def test_table_only_writes_nothing(tmp_path, capsys):
    folder = recorded("four_jobs", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    main([str(folder), "--table-only"])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_folder_of_nothing_is_refused_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


# Across sweeps


def today_and_yesterday(tmp_path):
    yesterday = recorded("four_jobs", tmp_path / "yesterday")
    return recorded("four_jobs", tmp_path / "today"), yesterday


def test_a_sweep_against_an_earlier_one(tmp_path, capsys):
    today, yesterday = today_and_yesterday(tmp_path)
    assert main([str(today), "--baseline", str(yesterday), "--table-only"]) == 0
    out = capsys.readouterr().out
    assert out.count("step before") == out.count("arithmetic: identical") == 1
    assert "Nobody can tell whether other processes disturbed the steps of baseline and job 0-3 (such" in " ".join(out.split())


def test_a_sweep_is_not_held_against_itself(tmp_path, capsys):
    today, yesterday = today_and_yesterday(tmp_path)
    for folder, baseline in ((today, today), (today / "1", today), (today, today / "1")):
        assert main([str(folder), "--baseline", str(baseline), "--table-only"]) == 1
        said = capsys.readouterr()
        assert said.err == f"{baseline} would be held against itself: --baseline takes the folder of another sweep.\n"
        assert said.out == ""
    assert main([str(today), str(yesterday), "--baseline", str(yesterday), "--table-only"]) == 0


@pytest.mark.parametrize("value", [0, -1.0, math.nan, None, "fast"])
def test_times_that_were_changed_by_hand_are_refused_in_a_sentence(value, tmp_path, capsys):
    folder = recorded("four_jobs", tmp_path)
    path = RunDir(folder / "1").result
    data = json.loads(path.read_text())
    data["ranks"][0]["steps"][5]["seconds"] = value
    path.write_text(json.dumps(data))
    assert main([str(folder), "--table-only"]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "four_jobs/1 cannot be read: its files are damaged" in said


def test_help_is_plain_text_and_options_are_not_shortened(capsys):
    for arguments in (["--help"], ["f", "--base", "g"]):
        with pytest.raises(SystemExit):
            main(arguments)
    said = capsys.readouterr()
    assert "python -m harness.compare DIR" in said.out and "`" not in said.out
    assert "unrecognized arguments: --base g" in said.err


def test_what_became_slower_is_seen():
    before = sweep_report("a", [with_trials(job_of(0, "spawn", 2), 1.0)], MACHINE)
    now = sweep_report("b", [with_trials(job_of(0, "spawn", 2), 1.5)], MACHINE)
    table = against_table(against(before, now))
    assert table.column("speed") == ["1.50x slower"]
    assert table.column("step before") != table.column("step now")


def test_where_own_runs_are_compared_the_table_shows_them():
    own = job_of(0, "spawn", 2)
    now = sweep_report("b", [with_trials(own, 1.5)], MACHINE)
    table = against_table(against(sweep_report("a", [own], MACHINE), now))
    assert table.column("speed") == ["1.00x (1 launch: no claim)"]
    assert table.column("step before") == table.column("step now")


def test_jobs_are_matched_by_settings_and_not_by_number():
    before = sweep_report("a", [job_of(0, "launch", 2), job_of(1, "spawn", 1)], MACHINE)
    now = sweep_report("b", [job_of(0, "spawn", 1), job_of(1, "launch", 2)], MACHINE)
    assert [(p.job.plan.job, p.before.plan.job) for p in against(before, now).pairs] == [(0, 1), (1, 0)]


def test_jobs_that_differ_in_how_they_compute_are_told_apart_and_in_how_they_are_watched_are_not():
    buckets = [job_of(n, nprocs=2, ddp=Ddp(bucket_cap_mb=size)) for n, size in enumerate((25.0, 1.0))]
    before, now = sweep_report("a", buckets, MACHINE), sweep_report("b", buckets, MACHINE)
    assert [(p.job.plan.job, p.before.plan.job) for p in against(before, now).pairs] == [(0, 0), (1, 1)]
    for name, value in {"compile": True, "num_workers": 2, "deterministic": False}.items():
        with pytest.raises(NotComparable, match=f"{name} is {value} against"):
            against(before, sweep_report("b", [job_of(0, nprocs=2, **{name: value})], MACHINE))
    assert len(against(before, sweep_report("b", [job_of(0, nprocs=2, log_every=1, compare="full")], MACHINE)).pairs) == 1


def test_what_cannot_be_compared_is_refused_with_both_values():
    before = sweep_report("a", [job_of(0), job_of(1, nprocs=2)], MACHINE)
    now = sweep_report("b", [job_of(0), job_of(3, nprocs=2, global_batch_size=128)], MACHINE)
    found = against(before, now)
    assert len(found.pairs) == 1
    assert "job 3 cannot be compared with job 1 of the baseline: global_batch_size is 128 against 32." in found.notes
    only = sweep_report("b", [now.jobs[1]], MACHINE)
    with pytest.raises(NotComparable, match="global_batch_size is 128 against 32"):
        against(before, only)


def test_nested_settings_are_named_by_their_path():
    job = job_of(0)
    recipe = {**job.plan.train.recipe, "lr": 0.5}
    train = dataclasses.replace(job.plan.train, recipe=recipe)
    other = dataclasses.replace(job, plan=dataclasses.replace(job.plan, train=train))
    with pytest.raises(NotComparable, match=r"recipe\.lr is 0\.5 against 0\.1"):
        against(sweep_report("a", [job], MACHINE), sweep_report("b", [other], MACHINE))


def test_other_machines_are_not_passed_over_in_silence():
    before = sweep_report("a", [job_of(0)], MACHINE)
    now = sweep_report("b", [job_of(0)], {**MACHINE, "torch": "2.14.0"})
    assert any("torch is 2.14.0 against 2.13.0" in note for note in against(before, now).notes)
    assert not any("machines" in note for note in against(before, before).notes)


def test_other_arithmetic_is_said():
    other = result_of(1)
    rank = dataclasses.replace(other.ranks[0], digests=({"done": 12, "parameters": "p1'"},))
    now = sweep_report("b", [job_of(0, result=dataclasses.replace(other, ranks=(rank,)))], MACHINE)
    (cell,) = against_table(against(sweep_report("a", [job_of(0)], MACHINE), now)).column("arithmetic")
    assert cell.startswith("differs, last loss 0.7656 against 0.7656")


# Reporters


class Mine:
    """A reporter as the documentation shows it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def report(self, sweep):
        Path(self.path).write_text(f"{len(sweep.jobs)} jobs")


class Broken:
    def started(self, job):
        raise ValueError("no disk")

    def report(self, sweep):
        raise AssertionError("it is left out after its first error")


def test_a_reporter_of_ones_own_is_one_class_and_one_node(tmp_path):
    node = {"_target_": f"{__name__}.Mine", "path": str(tmp_path / "mine.txt")}
    reporters = Reporters.from_config({"reporters": {"mine": node, "html": None}})
    reporters.begin("f", [])
    reporters.event(0, {"event": "step"})
    reporters.report(four_jobs("f"))
    assert (tmp_path / "mine.txt").read_text() == "4 jobs"


def test_a_broken_reporter_is_named_and_costs_nothing(tmp_path, capsys):
    mine = Mine(str(tmp_path / "mine.txt"))
    reporters = Reporters({"broken": Broken(), "mine": mine})
    job = job_of(0)
    reporters.started(Job(job.plan, RunDir("f/0")))
    reporters.report(four_jobs("f"))
    assert capsys.readouterr().err == "report.reporters.broken failed and is left out: ValueError: no disk\n"
    assert (tmp_path / "mine.txt").exists()


def test_a_reporter_that_cannot_be_made_is_named_with_its_setting():
    with pytest.raises(ConfigError, match=r"report\.reporters\.mine cannot be made: .*no_such_module"):
        Reporters.from_config({"reporters": {"mine": {"_target_": "no_such_module.Mine"}}})


def test_without_configuration_there_is_the_terminal():
    assert isinstance(Reporters.from_config(None)._reporters["terminal"], Terminal)


def test_the_terminal_reports_last():
    order = []

    class Note:
        def __init__(self, name):
            self.name = name

        def report(self, sweep):
            order.append(self.name)

    Reporters({"terminal": Note("terminal"), "html": Note("html")}).report(four_jobs("f"))
    assert order == ["html", "terminal"]


@pytest.mark.parametrize("name", ["default", "none", "full"])
def test_each_option_of_the_group_can_be_made(name):
    from hydra import compose, initialize
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    with initialize(config_path="../conf", version_base="1.3"):
        config = compose("config", overrides=[f"report={name}"])
    GlobalHydra.instance().clear()
    made = Reporters.from_config(OmegaConf.to_container(config.report))
    assert "terminal" in made._reporters and (len(made._reporters) == 1) == (name == "none")


def test_the_machine_is_known():
    facts = machine_facts()
    assert int(facts["cores"]) >= 1 and facts["python"].startswith("3.") and "GiB" in facts["memory"] and "torch" in facts


def test_a_job_that_changed_after_its_sweep_is_seen(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    shutil.rmtree(folder / "2")
    assert [job.plan.job for job in read_sweep(folder).jobs] == [0, 1, 3]
    assert changed(read_sweep(folder), 3, identical_to=None).jobs[2].identical_to is None


# Examples


class Recorded(list):
    """Stands in for a tracking library: whatever is called on it is noted, with its arguments."""

    def __getattr__(self, name):
        def called(*arguments, **named):
            self.append((name, arguments, named))
            return self

        return called

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize(
    ("module", "name", "argument", "library"),
    [("report_mlflow", "MLflow", "experiment", "mlflow"), ("report_wandb", "WandB", "project", "wandb")],
)
def test_examples_hand_over_settings_and_losses(monkeypatch, module, name, argument, library):
    calls = Recorded()
    monkeypatch.setitem(sys.modules, library, calls)
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples" / "reports")
    monkeypatch.delitem(sys.modules, module, raising=False)
    sweep = four_jobs("f")
    node = {"_target_": f"{module}.{name}", argument: "digits"}
    Reporters.from_config({"reporters": {library: node}}).report(sweep)
    said = str(calls)
    assert said.count("job 3") == 1 and "'launcher': 'launch'" in said and "digits" in said
    assert said.count(str(sweep.jobs[0].result.losses()[-1])) == 4

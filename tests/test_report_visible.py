"""What a terminal would obey is shown as text, wherever a record's text can enter a report."""

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from harness.report.html import sweep_html
from harness.report.junit import sweep_junit
from harness.report.markdown import sweep_markdown
from harness.report.rebuild import main
from harness.report.reporter import Reporters
from harness.report.sweep.build import sweep_report
from harness.report.sweep.folder import read_sweep
from harness.report.tensorboard import TensorBoard, hparams
from harness.report.terminal import Terminal
from harness.run.folder import RunDir, write_json
from harness.run.job import Job
from harness.run.record import Evaluation, Scalar
from harness.run.recorder import failure_of
from harness.run.visible import visible
from tests.reports import GREEN, MACHINE, RED, events, failed_result, job_of, plan_of, result_of, run_of, with_verdict, written

EVIL = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b2J\u202e"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def evil_result():
    result = failed_result(message=f"rank 1 failed: ValueError: {EVIL}")
    failure = dataclasses.replace(result.ranks[1].failure, message=EVIL, traceback=f"Traceback\nValueError: {EVIL}")
    return dataclasses.replace(result, ranks=(result.ranks[0], dataclasses.replace(result.ranks[1], failure=failure)))


def evil_jobs(folder):
    """Return a failed job, one that is red, and one that ended well, with such texts wherever a record has any."""
    red = dataclasses.replace(RED, detail=f"differs {EVIL}", where={"tensor": f"fc{EVIL}"})
    well = result_of(1)
    evaluations = (Evaluation(11, {f"loss{EVIL}": (1.0, 1.0)}),)
    rank = dataclasses.replace(well.ranks[0], evaluations=evaluations, scalars=(Scalar(f"mine{EVIL}", 3, 1.0),))
    jobs = [
        job_of(0, nprocs=2, result=evil_result(), folder=f"{folder}/0", overrides=(f"name={EVIL}",)),
        with_verdict(job_of(1, folder=f"{folder}/1", overrides=(f"recipe.name={EVIL}1",)), GREEN, red),
        job_of(2, result=dataclasses.replace(well, ranks=(rank,)), folder=f"{folder}/2", recipe={"_target_": "a.B", "x": EVIL}),
    ]
    return [dataclasses.replace(job, label={**job.label, "recipe": f"mnist{EVIL}{job.plan.job}"}) for job in jobs]


@pytest.fixture
def sweep(tmp_path):
    return sweep_report(str(tmp_path / "s"), evil_jobs(tmp_path / "s"), {**MACHINE, "cpu": EVIL})


def test_only_what_is_obeyed_is_written_out_and_records_without_it_are_not_copied():
    assert visible(EVIL) == SHOWN and visible("a\tb\n\u00e9 \u4e2d \U0001f600") == "a\tb\n\u00e9 \u4e2d \U0001f600"
    assert visible({"a": [(EVIL,), 1]}) == {"a": [(SHOWN,), 1]}
    job = job_of(0)
    assert visible(job) is job


def test_a_failure_is_recorded_so():
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        failure = failure_of(error)
    assert failure.message == SHOWN and SHOWN in failure.traceback and not OBEYED.search(failure.traceback)


@pytest.mark.parametrize("write", [sweep_markdown, sweep_html, sweep_junit])
def test_files_for_people_and_build_servers(sweep, write):
    text = write(sweep)
    # Markdown's own escapes are doubled, and taken away again by who shows it.
    assert SHOWN in re.sub(r"\\([\\\[\]])", r"\1", text)
    assert not OBEYED.search(text)


def test_the_table_and_the_sentences_of_the_terminal(sweep):
    stream = io.StringIO()
    Terminal(Console(file=stream, width=300)).report(sweep)
    assert SHOWN in stream.getvalue() and not OBEYED.search(stream.getvalue())


def test_what_the_terminal_says_while_jobs_run():
    stream, errors = io.StringIO(), io.StringIO()
    reporters = Reporters({"terminal": Terminal(Console(file=stream, width=200), Console(file=errors, width=200))})
    jobs = [Job(plan_of(n, nprocs=2), RunDir(f"a/{n}"), (), {"recipe": f"mnist{EVIL}", "x": f"{EVIL}{n}"}) for n in range(2)]
    reporters.begin("a", jobs)
    reporters.started(jobs[0])
    reporters.event(0, {"event": "evaluation", "step": 0, "metrics": {EVIL: [1.0, 1.0]}})
    reporters.ended(jobs[0], evil_result())
    assert stream.getvalue().count(SHOWN) >= 2 and errors.getvalue().count(SHOWN) == 2
    assert not OBEYED.search(stream.getvalue() + errors.getvalue())
    reporters.output("\x1b[32mgreen\x1b[0m")
    assert "\x1b[32mgreen" in stream.getvalue()


def test_texts_and_settings_in_tensorboard(sweep):
    TensorBoard().report(sweep)
    text = events(RunDir(sweep.folder).path).Tensors("verdicts")[0].tensor_proto.string_val[0].decode()
    assert r"\\x1b" in text and not OBEYED.search(text)
    assert hparams(sweep.jobs[2])["recipe.x"].string_value == SHOWN
    tags = run_of(RunDir(sweep.jobs[2].folder).path).Tags()["scalars"]
    assert f"mine{SHOWN}" in tags and f"loss{SHOWN}/eval" in tags and not any(map(OBEYED.search, tags))


def test_harness_compare_and_what_a_folder_from_elsewhere_holds(sweep, tmp_path, capsys):
    folder = written(dataclasses.replace(sweep, jobs=tuple(evil_jobs(tmp_path / "s"))))
    left_out = {"x": f"left out {EVIL}"}
    write_json(RunDir(folder / "2").audit, {"trials": [], "left_out": left_out})
    assert read_sweep(folder).jobs[0].result.account.endswith(SHOWN)
    assert main([str(folder), "--table-only"]) == 1
    (folder / "1" / "plan.json").write_text(json.dumps({EVIL: 1, "format": 1}))
    assert main([str(folder)]) == 1
    output, errors = capsys.readouterr()
    assert SHOWN in output and f"left out {SHOWN}" in output
    assert not OBEYED.search(output + errors)

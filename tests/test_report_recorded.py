"""harness.compare makes the reporters of the sweep again, a user's own included, and runs nothing else."""

import subprocess
import sys

import pytest

from harness.report.rebuild import main
from harness.report.recorded import recorded_reporters
from harness.report.sweep.folder import SweepDir
from harness.run.folder import write_json
from tests.reports import four_jobs, written

BEST = """
import pathlib

class Best:
    def __init__(self, file, words=()):
        self.file, self.words = file, words

    def report(self, sweep):
        pathlib.Path(self.file).write_text(f"{len(sweep.jobs)} jobs {' '.join(self.words)}")

class Live:
    def event(self, rank, event): ...

class Odd:
    def report(self): ...

def made(file): return Best(file)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_best_reports.py").write_text(BEST)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    yield "my_best_reports"
    sys.modules.pop("my_best_reports", None)


def sweep_of(tmp_path, **reporters):
    return written(four_jobs(str(tmp_path / "sweep")), {"reporters": reporters})


def test_a_reporter_of_ones_own_reports_again(tmp_path, module, capsys):
    best = {"_target_": f"{module}.Best", "file": str(tmp_path / "best.txt"), "words": ["a", "b"]}
    folder = sweep_of(tmp_path, best=best, json={"_target_": "harness.report.jsonfile.Json"})
    assert main([str(folder)]) == 0
    assert (tmp_path / "best.txt").read_text() == "4 jobs a b"
    assert (folder / "report.json").exists() and not (folder / "report.html").exists()
    assert "samples/s" in capsys.readouterr().out


def test_a_sweep_records_its_reporters(tmp_path, module):
    report = ["~report.reporters.json", f"+report.reporters.best={{_target_: {module}.Best, file: {tmp_path}/best.txt}}"]
    command = [sys.executable, "run.py", "backend=gloo", "nprocs=1", "steps=2", "compare=off", f"hydra.sweep.dir={tmp_path}/s"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "mine"), "HOME": str(tmp_path)}
    subprocess.run([*command, "recipe=transformer", *report], check=True, env=environment, capture_output=True)
    recorded = SweepDir(tmp_path / "s").read()["report"]["reporters"]
    assert recorded["best"] == {"_target_": f"{module}.Best", "file": f"{tmp_path}/best.txt"}
    assert "json" not in recorded and "html" in recorded


def test_the_table_alone_makes_no_reporter(tmp_path, module):
    folder = sweep_of(tmp_path, best={"_target_": f"{module}.Best", "file": str(tmp_path / "best.txt")})
    assert main([str(folder), "--table-only"]) == 0
    assert not (tmp_path / "best.txt").exists()


def test_a_folder_without_the_record_gets_the_reporters_of_report_default(tmp_path):
    folder = written(four_jobs(str(tmp_path / "sweep")))
    index = SweepDir(folder).read()
    del index["report"]
    write_json(SweepDir(folder).index, index)
    assert {"html", "junit", "json", "markdown", "pictures", "tensorboard", "terminal"} <= recorded_reporters(folder).keys()


def test_a_reporter_that_only_shows_running_jobs_is_passed_over(tmp_path, module, capsys):
    assert recorded_reporters(sweep_of(tmp_path, live={"_target_": f"{module}.Live"})) == {}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"_target_": "os.system", "command": "touch {victim}"}, "os.system is of Python's standard library"),
        ({"_target_": "logging.FileHandler", "filename": "{victim}"}, "is of Python's standard library"),
        ({"_target_": "my_best_reports.made", "file": "{victim}"}, "is no class, and only classes are"),
        ({"_target_": "hydra.utils.call", "config": {"_target_": "os.system"}}, "has an argument with _target_"),
        ({"_target_": "my_best_reports.Best", "file": {"_target_": "os.system"}}, "has an argument with _target_"),
        ({"_target_": "my_best_reports.Best", "file": "${oc.env:HOME}"}, "is to be interpolated"),
        ({"_target_": "my_best_reports.Best", "file": "{victim}", "_args_": ["x"]}, "has an argument with _args_"),
        ({"_target_": "my_best_reports.Odd"}, "has no report(sweep)"),
        ({"_target_": "gone.away.Best", "file": "x"}, "cannot be imported"),
        ({"_target_": "my_best_reports.Best"}, "cannot be made"),
        ({"_target_": ["os.system"]}, "is no name of a class"),
        ("os.system", "is no name of a class"),
    ],
)
def test_what_is_no_reporter_is_named_and_never_run(node, reason, tmp_path, module, capsys):
    victim = tmp_path / "victim"
    if isinstance(node, dict):
        node = {key: value.replace("{victim}", str(victim)) if isinstance(value, str) else value for key, value in node.items()}
    folder = sweep_of(tmp_path, bad=node, json={"_target_": "harness.report.jsonfile.Json"})
    main([str(folder)])
    message = capsys.readouterr().err
    assert reason in message and message.startswith("report.reporters.bad ") and len(message.splitlines()) == 1
    assert not victim.exists() and (folder / "report.json").exists()


def test_a_module_inside_of_the_folder_is_not_imported(tmp_path, monkeypatch, capsys):
    folder = sweep_of(tmp_path, bad={"_target_": "evil_reports.Best", "file": "x"})
    (folder / "evil_reports.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    main(["."])
    assert "lies in the folder that is being read" in capsys.readouterr().err

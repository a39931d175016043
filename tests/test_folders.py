"""Folders of runs: never shared by two commands or two jobs, never answering with what an earlier run left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness import config
from harness.errors import HarnessError
from harness.run.folder import RunDir, write_whole
from harness.run.job import alone_in

ROOT = Path(__file__).resolve().parent.parent


def test_each_command_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    path = str(tmp_path / "outputs" / "12-00-00")
    first = config.own_folder(path)
    assert config.own_folder(path) == first == path
    monkeypatch.setattr(config, "_own_folders", {})  # as in another process
    assert config.own_folder(path) == f"{path}-2"
    monkeypatch.setattr(config, "_own_folders", {})
    assert config.own_folder(path) == f"{path}-3"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "outputs").touch()
    with pytest.raises(SystemExit, match=r"outputs/12-00-00 cannot be made: Not a directory\. hydra\.sweep\.dir=FOLDER takes"):
        config.own_folder(str(tmp_path / "outputs" / "12-00-00"))


def test_a_folder_in_use_is_refused(tmp_path):
    with alone_in(tmp_path):
        code = f"from pathlib import Path\nfrom harness.run.job import alone_in\nwith alone_in(Path({str(tmp_path)!r})): pass"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and "another command is running in" in done.stderr
    with alone_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_within_one_process_is_no_different(tmp_path):
    with alone_in(tmp_path), pytest.raises(HarnessError, match="another command is running"), alone_in(tmp_path):
        pass


def test_nothing_of_an_earlier_run_answers_for_the_next(tmp_path):
    run = RunDir(tmp_path)
    run.trial(0).path.mkdir(parents=True)
    run.trial(0).plan.write_text("{}")
    passing = [run.store, run.capture(1), run.rank_stacks(0), run.ending(0), tmp_path / ".checkpoint.pt.aside"]
    for path in (run.evidence, run.audit, run.result, run.records(0), run.log(0), run.value(0), *passing):
        path.write_text("old")
    run.checkpoint.write_text("to go on from")
    run.clear()
    assert [path.name for path in tmp_path.iterdir()] == [run.checkpoint.name]


def test_a_file_that_cannot_be_written_whole_is_not_left_half(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError))
    with pytest.raises(OSError):
        write_whole(RunDir(tmp_path).value(1), b"half")
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_a_killed_rank_has_begun_is_left(tmp_path):
    run = RunDir(tmp_path)
    half = run.value(1).with_name(f".{run.value(1).name}.1234.aside")
    for path in (half, run.store, run.capture(1), run.rank_stacks(0), run.ending(0), tmp_path / ".checkpoint.pt.aside"):
        path.write_text("begun")
    for path in (run.records(0), run.checkpoint, tmp_path / ".hidden"):
        path.write_text("kept")
    assert len(list(tmp_path.iterdir())) == 9
    run.tidy()
    assert {path.name for path in tmp_path.iterdir()} == {run.records(0).name, run.checkpoint.name, ".hidden"}


def test_two_jobs_of_one_folder_are_refused_before_any_rank_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["backend=gloo", "nprocs=2", "launcher=launch", "seed=0,1", "hydra.sweep.subdir=same"]
    done = subprocess.run([sys.executable, str(ROOT / "run.py"), *overrides], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "job 1 would write over job 0" in done.stderr and "${hydra.job.num}" in done.stderr
    assert not list(tmp_path.rglob("rank-*"))

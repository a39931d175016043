"""CONTRIBUTING.md: each change that it shows applies to this code, and what it adds works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SWEEP = [
    *("recipe=line", "launcher=nice", "fault=none,gradient_turned_around", "note=a line to start with"),
    *("backend=gloo", "nprocs=2", "threads=1", "steps=4", "hydra.sweep.dir=out"),
]


def changes() -> Mapping[str, str]:
    """Return heading -> the change that the section shows."""
    return dict(re.findall(r"^## (\w+)\n.*?^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S))


def run(*command: str, cwd: Path, said: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=environment, input=said, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tracked files with all the changes in it."""
    copy = tmp_path_factory.mktemp("changed")
    for name in run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    run("git", "init", "-q", cwd=copy)
    for heading, change in changes().items():
        done = run("git", "apply", "-C1", "-", cwd=copy, said=change)
        assert done.returncode == 0, f"{heading}: {done.stderr}"
    return copy


def test_each_thing_that_is_added_often_has_its_change() -> None:
    assert list(changes()) == ["Setting", "Launcher", "Fault", "Reporter", "Check", "Recipe"]


def test_what_was_added_is_in_the_help(changed: Path) -> None:
    said = run(sys.executable, "run.py", "--help", "recipe=line", cwd=changed).stdout
    for line in (
        r"note= +what the run is for",
        r"recipe\.lr=0\.1 +learning rate",
        r"launcher: .*\bnice\b",
        r"fault: .*turned_around",
    ):
        assert re.search(line, said), line


@pytest.mark.ranks
def test_what_was_added_works(changed: Path) -> None:
    done = run(sys.executable, "run.py", *SWEEP, cwd=changed)
    assert "job 1 failed: R4 (reduction) is red" in done.stdout, done.stdout + done.stderr
    plan = json.loads((changed / "out" / "0" / "plan.json").read_text())
    assert (plan["method"], plan["train"]["note"]) == ("nice", "a line to start with")
    assert "a line to start with" in done.stdout
    checks = json.loads((changed / "out" / "report.json").read_text())["jobs"][0]["checks"]
    assert [check["status"] for check in checks if check["name"] == "R15"] == ["passed"]
    assert re.fullmatch(r"job,loss\n0,[\d.]+\n", (changed / "out" / "losses.csv").read_text())

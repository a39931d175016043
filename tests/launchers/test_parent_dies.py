"""Whatever ends the parent ends its ranks, their DataLoader workers and the warm server, within 5 s, and leaves no file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.rundir import RunDir
from tests.processes import alive, descendants, wait_until

pytestmark = pytest.mark.ranks

PROGRAM = """
import sys
from harness.launchers import pool
from harness.launchers.signals import Interrupted
from harness.rundir import RunDir
from harness.sweep import run_job
from tests.launchers.starting import echo_plan

try:
    run_job(echo_plan(sys.argv[1], {"*": sys.argv[3]}), RunDir(sys.argv[2]))
except Interrupted as interruption:
    pool.close_all()
    sys.exit(128 + interruption.number)
"""


_parents: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in which the parents keep their temporary files."""
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    for parent in _parents:
        parent.kill()
        parent.wait()
    _parents.clear()
    assert wait_until(lambda: not list((tmp_path / "tmp").glob("harness-*")), 5), list((tmp_path / "tmp").glob("*/**"))


def command(how: str, folder: Path, behaviour: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, how, str(folder / "run"), behaviour]


def start(how: str, folder: Path, behaviour: str = "workers", ignore: bool = False) -> tuple[subprocess.Popen[bytes], set[int]]:
    """Start a parent; return it and all that it has started, once every rank iterates over its data."""
    parent = subprocess.Popen(
        # As a shell starts a job in the background.
        ["sh", "-c", "trap '' INT; exec \"$@\"" if ignore else 'exec "$@"', "sh", *command(how, folder, behaviour)],
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        stderr=(folder / "stderr").open("wb"),
    )
    _parents.append(parent)
    told = "iterating" if behaviour == "workers" else "waiting"
    ranks = 1 if how == "inline" else 2
    ready = wait_until(lambda: all((folder / "run" / f"{told}-{rank}").exists() for rank in range(ranks)), 60)
    assert ready, (folder / "stderr").read_text()
    below = set(descendants(parent.pid))
    if behaviour == "workers":
        assert len(below) >= 2 * ranks + (0 if how == "inline" else ranks)
    return parent, below


def assert_gone(below: set[int]) -> None:
    assert wait_until(lambda: not any(map(alive, below)), 5), [pid for pid in below if alive(pid)]


def assert_records_are_readable(folder: Path, ranks: int = 2) -> None:
    run = RunDir(folder / "run")
    assert json.loads(run.plan.read_text())["nprocs"] == ranks
    assert all(run.events(rank)[0]["event"] == "start" for rank in range(ranks))


@pytest.mark.parametrize("how", ["spawn", "spawn-spawn", "spawn-fork", "launch", "torchrun", "inline"])
def test_killed_parent_leaves_nobody(how: str, folder: Path) -> None:
    parent, below = start(how, folder)
    parent.kill()
    parent.wait()
    assert_gone(below)
    assert_records_are_readable(folder, 1 if how == "inline" else 2)


@pytest.mark.parametrize(
    ("how", "number", "ignore"),
    [
        ("spawn", signal.SIGTERM, False),
        ("spawn", signal.SIGINT, True),
        ("spawn-fork", signal.SIGINT, False),
        ("launch", signal.SIGHUP, False),
        ("launch", signal.SIGINT, True),
        ("torchrun", signal.SIGTERM, False),
        ("torchrun", signal.SIGINT, True),
        ("inline", signal.SIGINT, False),
        ("inline", signal.SIGTERM, False),
    ],
)
def test_signal_ends_all_with_its_status(how: str, number: int, ignore: bool, folder: Path) -> None:
    parent, below = start(how, folder, ignore=ignore)
    parent.send_signal(number)
    assert parent.wait(5) == 128 + number
    assert_gone(below)
    assert_records_are_readable(folder, 1 if how == "inline" else 2)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        *((how, number) for how in ("spawn", "launch", "torchrun") for number in (signal.SIGKILL, signal.SIGTERM)),
        # After SIGTERM to an inline rank its child is there as long as the program is.
        ("inline", signal.SIGKILL),
    ],
)
def test_shared_memory_of_killed_processes_is_removed(how: str, number: int, folder: Path) -> None:
    parent, below = start(how, folder, "shared memory")
    pids = {*below, parent.pid}

    def left() -> list[Path]:
        files = list(Path("/dev/shm").glob("torch_*_1_0")) + list(Path("/dev/shm").glob("sem.harness-*"))
        return [path for path in files if pids & {int(part) for part in re.findall(r"\d+", path.name)}]

    ranks = 1 if how == "inline" else 2
    assert wait_until(lambda: len(left()) == 4 * ranks), left()
    parent.send_signal(number)
    parent.wait(15)
    assert_gone(below)
    assert wait_until(lambda: not left(), 5), left()


def test_deaf_ranks_are_gone_as_well(folder: Path) -> None:
    parent, below = start("torchrun", folder, "deaf")
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(5) == 143
    assert_gone(below)


def test_signal_while_the_warm_server_starts(folder: Path) -> None:
    parent = subprocess.Popen(
        command("spawn", folder, "for ever"),
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )
    assert wait_until(lambda: descendants(parent.pid))
    below = set(descendants(parent.pid))
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(5) == 143
    assert_gone(below)

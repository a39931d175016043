"""Whatever ends the parent ends its ranks, their DataLoader workers and the warm server, within 5 s, and leaves no file."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.run.folder import RunDir
from tests.processes import PATIENCE_S, alive, descendants, scaled, wait_until

pytestmark = pytest.mark.ranks

PROGRAM = """
import json, sys
from harness.launchers import registry
from harness.launchers.signals import Interrupted
from harness.entrypoints.console import Console
from harness.run.folder import RunDir
from harness.entrypoints.run_job import run_job
from tests.launchers.starting import echo_plan

try:
    run_job(echo_plan(sys.argv[1], json.loads(sys.argv[3]), **json.loads(sys.argv[4])), RunDir(sys.argv[2]), Console())
    (RunDir(sys.argv[2]).path / "went on").touch()
except Interrupted as interruption:
    registry.close_all()
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
    assert wait_until(lambda: not list((tmp_path / "tmp").glob("harness-*")), scaled(5)), list((tmp_path / "tmp").glob("*/**"))


def command(how: str, folder: Path, behaviour: str | Mapping[str, str], **settings: object) -> list[str]:
    behaviours = {"*": behaviour} if isinstance(behaviour, str) else behaviour
    return [sys.executable, "-c", PROGRAM, how, str(folder / "run"), json.dumps(behaviours), json.dumps(settings)]


def start_quickly(
    folder: Path, behaviour: str | Mapping[str, str], stdout: int | None = None, stderr: int | None = None, **settings: object
) -> subprocess.Popen[bytes]:
    """Start a parent without waiting for its ranks."""
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    parent = subprocess.Popen(command("launch", folder, behaviour, **settings), env=environment, stdout=stdout, stderr=stderr)
    _parents.append(parent)
    return parent


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return both ends of a pipe that holds one page."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def is_full(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return not poll.poll(0)


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
    ready = wait_until(lambda: all((folder / "run" / f"{told}-{rank}").exists() for rank in range(ranks)))
    assert ready, (folder / "stderr").read_text()
    below = descendants(parent.pid)
    if behaviour == "workers":
        assert len(below) >= 2 * ranks + (0 if how == "inline" else ranks)
    return parent, below


def assert_gone(below: set[int]) -> None:
    assert wait_until(lambda: not any(map(alive, below)), scaled(5)), [pid for pid in below if alive(pid)]


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
        ("launch", signal.SIGHUP, False),
        ("launch", signal.SIGINT, True),
        ("torchrun", signal.SIGTERM, False),
        ("inline", signal.SIGINT, False),
    ],
)
def test_signal_ends_all_with_its_status(how: str, number: int, ignore: bool, folder: Path) -> None:
    parent, below = start(how, folder, ignore=ignore)
    parent.send_signal(number)
    assert parent.wait(scaled(5)) == 128 + number
    assert_gone(below)
    assert_records_are_readable(folder, 1 if how == "inline" else 2)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        *((how, signal.SIGKILL) for how in ("spawn", "launch", "torchrun", "inline")),
        # After SIGTERM to an inline rank its child is there as long as the program is.
        *((how, signal.SIGTERM) for how in ("spawn", "launch")),
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
    parent.wait(scaled(15))
    assert_gone(below)
    assert wait_until(lambda: not left(), scaled(5)), left()


def test_deaf_ranks_are_gone_as_well(folder: Path) -> None:
    parent, below = start("torchrun", folder, "deaf")
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(scaled(5)) == 143
    assert_gone(below)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_ranks_are_stopped_after_a_failure(number: int, folder: Path) -> None:
    parent = start_quickly(folder, {"0": "stubborn", "1": "raise when 0 is ready"}, grace_s=100.0)
    assert wait_until((folder / "run" / "stopping-0").exists)
    below = descendants(parent.pid)
    parent.send_signal(number)
    assert parent.wait(scaled(5)) == 128 + number
    assert_gone(below)
    assert not (folder / "run" / "went on").exists()


@pytest.mark.parametrize("behaviour", ["lines and wait", "long line and wait"])
@pytest.mark.parametrize("both", [False, True])
def test_signal_while_nobody_reads(behaviour: str, both: bool, folder: Path, pipe: tuple[int, int]) -> None:
    parent = start_quickly(folder, behaviour, stdout=pipe[1], stderr=pipe[1] if both else None)
    assert wait_until(lambda: (folder / "run" / "waiting-1").exists() and is_full(pipe[1]))
    below = descendants(parent.pid)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(scaled(5)) == 143
    assert_gone(below)


def test_failure_while_nobody_reads(folder: Path, pipe: tuple[int, int]) -> None:
    parent = start_quickly(folder, {"0": "lines and wait", "1": "os._exit(3) when told"}, stdout=pipe[1])
    run = RunDir(folder / "run")
    assert wait_until(lambda: (run.path / "waiting-0").exists() and is_full(pipe[1]))
    below = descendants(parent.pid)
    (run.path / "go").touch()
    pid = run.events(0)[0]["pid"]
    assert pid in below and wait_until(lambda: not alive(pid))
    assert parent.poll() is None
    read = b""
    while not read.endswith(b"rank 0 line 999\n"):
        read += os.read(pipe[0], 4096)
    assert read.decode().splitlines() == [f"rank 0 line {number}" for number in range(1000)]
    assert parent.wait(PATIENCE_S) == 0
    result = json.loads(run.result.read_text())
    assert (result["failed_rank"], result["exit_code"]) == (1, 3)


def test_signal_while_the_warm_server_starts(folder: Path) -> None:
    parent = subprocess.Popen(
        command("spawn", folder, "for ever"),
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
    )
    assert wait_until(lambda: descendants(parent.pid))
    below = descendants(parent.pid)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(scaled(5)) == 143
    assert_gone(below)


WARMING = """
import time
from harness.launchers import registry

registry.warm_up()
while True:
    time.sleep(1)
"""


ENDLESS = """
import pathlib, time

pathlib.Path(__file__).with_name("imports").touch()
time.sleep(1e6)
"""


def start_warming(folder: Path) -> subprocess.Popen[bytes]:
    """Start a parent whose warm server imports a torch that takes for ever; return it once the server is in there."""
    (folder / "torch.py").write_text(ENDLESS)
    parent = subprocess.Popen(
        [sys.executable, "-c", WARMING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]), "TMPDIR": str(folder / "tmp")},
        stderr=(folder / "stderr").open("wb"),
    )
    _parents.append(parent)
    assert wait_until((folder / "imports").exists), (folder / "stderr").read_text()
    return parent


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_parent_that_dies_while_the_server_imports_leaves_nobody(number: int, folder: Path) -> None:
    parent = start_warming(folder)
    below = descendants(parent.pid)
    parent.send_signal(number)
    assert parent.wait(PATIENCE_S) == -number
    assert below and wait_until(lambda: not any(map(alive, below)))


INTERRUPTED_AT_ITS_END = """
import os, signal
from harness.launchers import registry

class Interrupted:
    def close(self):
        os.kill(os.getpid(), signal.SIGINT)

registry.LAUNCHERS["interrupted"] = Interrupted
registry.launcher("interrupted")
"""


def test_a_second_interrupt_leaves_no_traceback_of_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_AT_ITS_END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

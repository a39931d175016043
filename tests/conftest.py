"""Fixtures of all tests; each test fails if it leaves a process, an environment variable, a process group or a file behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launchers import registry
from harness.launchers.spawn import SpawnLauncher
from tests.processes import command_line, descendants, wait_until


def warm_server_pid() -> int | None:
    """Return the process id of this session's own warm server."""
    spawn = registry._launchers.get("spawn")
    server = spawn._server if isinstance(spawn, SpawnLauncher) else None
    return server._child.pid if server is not None else None


@pytest.fixture(scope="session", autouse=True)
def _private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give this session and what it starts a temporary folder of their own, in which leaks show."""
    before, folder = os.environ.get("TMPDIR"), tmp_path_factory.mktemp("tmp")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    yield folder
    registry.close_all()
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


@pytest.fixture(scope="session", autouse=True)
def _hangups_are_heard() -> Iterator[None]:
    """See to it that a suite under ``nohup``, which ignores SIGHUP, does not hand that on to what it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session", autouse=True)
def _leaks_can_be_seen() -> None:
    if not Path("/proc/thread-self/children").exists():
        pytest.exit("This kernel does not list the children of a process (CONFIG_PROC_CHILDREN): no leak would show.", 1)


@pytest.fixture(autouse=True)
def _nothing_is_left(_private_temporary_folder: Path) -> Iterator[None]:
    environment, processes, files = dict(os.environ), descendants(os.getpid()), _files(_private_temporary_folder)
    yield

    def left() -> list[str]:
        new = descendants(os.getpid()) - processes - {warm_server_pid()}
        return [f"process {pid}: {command_line(pid)}" for pid in new] + sorted(_files(_private_temporary_folder) - files)

    wait_until(lambda: not left(), 3.0)
    assert left() == [], "left behind by this test"
    changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    # torch._dynamo sets the second when the first optimizer of a process is made.
    assert changed <= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}, "environment variables changed by this test"
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), "process group left by this test"


def _files(folder: Path) -> set[str]:
    here = {str(path) for path in Path.cwd().iterdir() if path.name in ("outputs", "multirun")}
    found = here | {str(path) for path in folder.iterdir()} | _shared_memory()
    # torch's own cache, made once by an import.
    return {path for path in found if not Path(path).name.startswith("torchinductor_")}


def _shared_memory() -> set[str]:
    """Return the files of shared memory that no living process has mapped: other people's programs use it too."""
    folder = Path("/dev/shm")
    files = {str(path) for path in folder.iterdir()} if folder.exists() else set()
    if not files:
        return files
    maps = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                maps.append((process / "maps").read_text(errors="replace"))
    return {name for name in files if not any(name in text for text in maps)}


@pytest.fixture
def odd_path(tmp_path: Path) -> Path:
    """Return a folder whose name holds what shells, Hydra and file patterns take apart."""
    path = tmp_path / 'it\'s a "folder", a=b [c] {d} $e'
    path.mkdir()
    return path

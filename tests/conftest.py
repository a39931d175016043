"""Fixtures of all tests; each test fails if it leaves a process, an environment variable, a process group or a file behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launchers import registry
from harness.launchers.spawn import SpawnLauncher
from tests.browser import MISSING
from tests.processes import command_line, descendants, wait_until

LONGEST = (
    *("test_faults", "test_contract", "test_spawn", "test_resuming", "test_parent_dies", "test_hydra_app", "test_examples"),
    *("test_recipes", "test_environment", "test_parallel", "test_sweep", "test_trainer", "test_verified_jobs", "test_run"),
    *("test_hydra_suites", "test_launch", "test_trials", "test_distributed", "test_report_browser", "test_wheel"),
)


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
def _signals_are_heard() -> Iterator[None]:
    """See to it that a suite under ``nohup``, or in a script's background, does not hand on that it ignores signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _leaks_can_be_seen() -> None:
    if not Path("/proc/thread-self/children").exists():
        pytest.exit("This kernel does not list the children of a process (CONFIG_PROC_CHILDREN): no leak would show.", 1)


@pytest.fixture(autouse=True)
def _nothing_is_left(_private_temporary_folder: Path) -> Iterator[None]:
    environment, processes, files = dict(os.environ), descendants(os.getpid()), _files(_private_temporary_folder)
    shared = _shared_memory()
    yield

    def left() -> list[str]:
        new = descendants(os.getpid()) - processes - {warm_server_pid()}
        return [f"process {pid}: {command_line(pid)}" for pid in new] + sorted(_files(_private_temporary_folder) - files)

    wait_until(lambda: not left(), 3.0)
    assert left() == [], "left behind by this test"
    assert _staying(_shared_memory() - shared) == set(), "left behind in shared memory by this test"
    changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    # torch._dynamo sets the second when the first optimizer of a process is made.
    assert changed <= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}, "environment variables changed by this test"
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), "process group left by this test"


def _files(folder: Path) -> set[str]:
    here = {str(path) for path in Path.cwd().iterdir() if path.name in ("outputs", "multirun")}
    found = here | {str(path) for path in folder.iterdir()}
    # torch's own cache, made once by an import.
    return {path for path in found if not Path(path).name.startswith("torchinductor_")}


def _staying(files: set[str]) -> set[str]:
    """Return which of these files of shared memory do not go away: other programs, and tests beside this one, use it too."""
    deadline = time.monotonic() + 20.0
    while files and time.monotonic() < deadline:
        time.sleep(0.02)
        files = files & _shared_memory()
    return files


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest where two are run side by side."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line how to get what tests were skipped for."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests in a browser were skipped; {MISSING}.", yellow=True)


@pytest.fixture
def odd_path(tmp_path: Path) -> Path:
    """Return a folder whose name holds what shells, Hydra and file patterns take apart."""
    path = tmp_path / 'it\'s a "folder", a=b [c] {d} $e'
    path.mkdir()
    return path

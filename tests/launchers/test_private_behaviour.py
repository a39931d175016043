"""What is private of Python and torch, and counted on here: each test fails where a new version does it differently."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest


def printed(program: str, *flags: str) -> list[str]:
    """Return the lines that a program prints in an interpreter of its own."""
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_multiprocessing_keeps_sockets_and_semaphores_where_its_private_configuration_says(tmp_path: Path) -> None:
    """For harness/rank/lifetime.py; the length of a socket's name for harness/launchers/temp_dir.py."""
    program = (
        "import multiprocessing, sys; from multiprocessing import connection, synchronize\n"
        f"multiprocessing.current_process()._config.update(tempdir={str(tmp_path)!r}, semprefix='/mine')\n"
        "print(connection.arbitrary_address('AF_UNIX')); print(synchronize.SemLock._make_name())"
    )
    address, semaphore = printed(program)
    assert address.startswith(f"{tmp_path}/listener-") and len(address) == len(f"{tmp_path}/listener-12345678")
    assert semaphore.startswith("/mine-")


def test_exit_functions_can_be_dropped_and_called() -> None:
    """For harness/rank/process.py, whose ranks end by ``os._exit``."""
    program = (
        "import atexit, os; atexit.register(print, 'dropped'); atexit._clear()\n"
        "atexit.register(print, 'called', flush=True); atexit._run_exitfuncs(); os._exit(0)"
    )
    assert printed(program) == ["called"]


def test_threads_can_be_waited_for_as_at_the_end_of_python() -> None:
    """For harness/rank/process.py."""
    program = (
        "import os, threading; go = threading.Event()\n"
        "threading.Thread(target=lambda: (go.wait(), print('done', flush=True))).start()\n"
        "threading.Timer(0.05, go.set).start(); threading._shutdown(); os._exit(0)"
    )
    assert printed(program) == ["done"]


def test_flags_of_this_interpreter_are_put_together() -> None:
    """For harness/launchers/base.py."""
    program = "from harness.launchers.base import module_command; print(*module_command('m')[1:])"
    (words,) = printed(program, "-O", "-X", "utf8", "-W", "ignore")
    assert {"-O", "-Wignore", "utf8"} < set(words.split()) and words.endswith(" -P -m m")


@pytest.mark.parametrize("is_set", [True, False])
def test_ranks_are_clients_where_torch_takes_the_store_for_an_agents(is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For harness/rank/store.py."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_set))
    assert rendezvous._torchelastic_use_agent_store() is is_set

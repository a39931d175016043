"""What the kernel counted beside a rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.training.meter import Meter, _busy_s, _children_s


def test_own_work_is_part_of_the_machines() -> None:
    with Meter() as meter:
        before = meter.read()
        begin = time.process_time()
        while time.process_time() < begin + 0.3:
            pass
        after = meter.read()
    own = after.cpu_s - before.cpu_s
    assert own >= 0.29
    assert after.busy_s is not None and before.busy_s is not None
    # Idle time comes in units of 10 ms a core.
    assert after.busy_s - before.busy_s >= own - 0.05
    assert after.t - before.t >= own - 0.05


def test_a_machine_that_does_not_say_how_long_it_was_idle(tmp_path: Path) -> None:
    assert _busy_s(tmp_path / "stat") is None
    (tmp_path / "stat").write_text("cpu 1 2\n")
    assert _busy_s(tmp_path / "stat") is None


BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"


def test_work_of_child_processes_is_a_ranks_own_while_they_live_and_after() -> None:
    with Meter() as meter:
        before = meter.read()
        child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        while_it_lives = meter.read()
        child.communicate(b"\n")
        after = meter.read()
    assert while_it_lives.cpu_s - before.cpu_s >= 0.28
    assert 0.28 <= after.cpu_s - before.cpu_s <= while_it_lives.cpu_s - before.cpu_s + 0.2


def test_a_kernel_that_does_not_list_children_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "self" / "task" / "1").mkdir(parents=True)
    (tmp_path / "self" / "task" / "1" / "children").write_text("77 78 ")
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "stat").write_text("77 (a (b) c) S 1 77 77 0 -1 0 0 0 0 0 200 100 0 0 20")
    ended = _children_s(tmp_path / "none")
    assert _children_s(tmp_path) - ended == pytest.approx(300 / os.sysconf("SC_CLK_TCK"))


def test_only_cores_that_this_process_may_use_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cpu 9 9 9 1010 100\ncpu0 9 9 9 500 60\ncpu1 9 9 9 505 39\nintr 1\n"
    (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    for cores, ticks in (({0}, 560), ({1}, 544), ({0, 1}, 1110)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        assert _busy_s(tmp_path / "stat") == pytest.approx(100 * len(cores) - ticks / os.sysconf("SC_CLK_TCK"))

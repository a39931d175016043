"""What the kernel counted beside a rank."""

from __future__ import annotations

import time
from pathlib import Path

from harness.meter import Meter, _busy_s


def test_own_work_is_part_of_the_machines() -> None:
    with Meter() as meter:
        before = meter.read()
        while time.process_time() < before.cpu_s + 0.3:
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

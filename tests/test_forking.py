"""A process that is about to fork."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.training import forking


def test_threads_are_waited_for_until_they_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = tmp_path / str(os.getpid()), tmp_path / "7"
    for task, state in ((own, "R"), (other, "R")):
        task.mkdir()
        (task / "stat").write_text(f"7 (a) name) {state} 1 2")
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (other / "stat").write_text("7 (a) name) S 1 2")

    monkeypatch.setattr(forking.time, "sleep", sleep)
    forking.let_threads_rest(tmp_path)
    assert len(looks) == 3
    (other / "stat").write_text("7 (a) name) R 1 2")
    forking.let_threads_rest(tmp_path)
    assert len(looks) == 3 + forking.MOST_LOOKS, "one that works for itself is not waited for for ever"

"""``python run.py``, and the command ``harness`` of an installed wheel, from outside."""

from __future__ import annotations

import pytest

import run
from harness.launchers import pool


def test_the_command_warms_up_and_ends_quietly_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[list[str]] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["harness", "launcher=spawn"])
    monkeypatch.setattr(pool, "warm_up_for", warmed.append)
    monkeypatch.setattr(run, "main", interrupted)
    with pytest.raises(SystemExit) as left:
        run.cli()
    assert (left.value.code, warmed) == (130, [["launcher=spawn"]])

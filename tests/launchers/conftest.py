"""Echo ranks for the tests of launchers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.entrypoints.run_job import run_job
from harness.run.folder import RunDir
from tests.launchers.starting import STARTS, Echo, Echoed, Heard, echo_plan


@pytest.fixture
def echo(tmp_path: Path) -> Echo:
    """Return a function that runs echo ranks, each call in a folder of its own."""
    number = iter(range(10_000))

    def run(how: str, behaviour: Mapping[str, str], folder: Path | None = None, **settings: Any) -> Echoed:
        heard, place = Heard(), RunDir(folder or tmp_path / f"run-{next(number)}")
        return Echoed(run_job(echo_plan(how, behaviour, **settings), place, heard), place, heard)

    return run


@pytest.fixture(params=["spawn", "launch"])
def how(request: pytest.FixtureRequest) -> str:
    """Return the two ways to start ranks that keep the whole contract: forked from a server, and as programs."""
    return str(request.param)


@pytest.fixture(params=list(STARTS))
def any_how(request: pytest.FixtureRequest) -> str:
    """Return each way to start several ranks, for one case of each kind."""
    return str(request.param)

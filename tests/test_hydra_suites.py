"""Hydra's own suites for launcher plugins.

They hand over task functions that no module holds (the runner itself, or nested functions), which only ``inline`` can run:
for the other launchers the functions are module-level ones of this file, by ``ModuleLevel``. What does not apply is skipped
below, each with its reason.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite
from hydra.test_utils.test_utils import SweepTaskFunction
from omegaconf import DictConfig

from hydra_plugins.harness_launcher import HarnessLauncher

pytestmark = pytest.mark.ranks

INLINE = ["hydra.launcher.method=inline", "hydra.launcher.nprocs=1"]
SPAWN = ["hydra.launcher.method=spawn", "hydra.launcher.nprocs=2"]


def test_discovery() -> None:
    assert HarnessLauncher.__name__ in [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]


def answer(cfg: DictConfig) -> int:
    return 100


class ModuleLevel(SweepTaskFunction):
    """A sweep whose task function is :func:`answer`, which ranks can import."""

    def __enter__(self) -> ModuleLevel:
        Path(self.temp_dir or "").mkdir(parents=True, exist_ok=True)
        hydra = Hydra.create_main_hydra_file_or_module(
            self.calling_file, self.calling_module, self.config_path, job_name="a_module"
        )
        try:
            overrides = [*copy.deepcopy(self.overrides or []), f"hydra.sweep.dir={self.temp_dir}"]
            self.returns = hydra.multirun(self.config_name, answer, overrides, self.configure_logging)
        finally:
            GlobalHydra().clear()
        return self


@pytest.fixture
def hydra_sweep_runner(request: pytest.FixtureRequest) -> Callable[..., SweepTaskFunction]:
    """Return Hydra's runner, with what a rank can import in place of its nested functions where ranks are processes."""

    def run(temp_dir: Path, overrides: list[str] | None = None, configure_logging: bool = False, **settings: Any) -> Any:
        sweep = ModuleLevel() if set(SPAWN) <= set(overrides or []) else SweepTaskFunction()
        sweep.temp_dir, sweep.overrides, sweep.configure_logging = str(temp_dir), overrides or [], configure_logging
        for name, value in settings.items():
            setattr(sweep, name, value)
        return sweep

    return run


@pytest.fixture
def hydra_restore_singletons() -> Iterator[None]:
    """Restore what Hydra keeps of this process, as its own plugin for pytest does."""
    before = copy.deepcopy(Singleton.get_state())
    yield
    Singleton.set_state(before)


@pytest.mark.parametrize(("launcher_name", "overrides"), [("harness", INLINE)])
class TestInline(LauncherTestSuite):
    pass


@pytest.mark.parametrize(("launcher_name", "overrides"), [("harness", SPAWN)])
class TestSpawn(LauncherTestSuite):
    def test_sweep_with_custom_resolver(self, launcher_name: str, overrides: list[str]) -> None:  # type: ignore[override]
        pytest.skip("its task function returns a setting; resolvers are in test_hydra_app.py")


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("harness", [*INLINE, "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])],
)
class TestBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=harness", "hydra.launcher.method=launch", "hydra.launcher.nprocs=1"])],
)
class TestIntegration(IntegrationTestSuite):
    @pytest.fixture(autouse=True)
    def _harness_is_importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))

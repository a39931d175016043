"""The parent's main script in a rank: loaded without its main guard, as Python's own multiprocessing does."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from harness.errors import ConfigError
from harness.run.plan import Task

_loading: list[str] = []


def describe_main() -> tuple[str | None, str | None]:
    """Return path and module name of this process's ``__main__``; None for what it does not have."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    # A program from standard input has the path <stdin>, which no rank can load; one that was typed in has none.
    if path is None or not os.path.exists(path):
        return None, None
    return os.path.abspath(path), spec.name if spec is not None else None


def load_main(task: Task) -> ModuleType:
    """Import the parent's ``__main__`` without its main guard, and let pickles find it under both of its names."""
    if task.main_path is None:
        return sys.modules["__main__"]
    # The loader is named because a command that pip installed has no suffix that would tell.
    loader = SourceFileLoader("__mp_main__", task.main_path)
    spec = importlib.util.spec_from_file_location("__mp_main__", task.main_path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # A module that was run by python -m may import by relative names, for which Python asks the package.
    if task.main_module is not None:
        module.__package__ = task.main_module.removesuffix(".__main__").rpartition(".")[0]
        if task.main_module.endswith(".__main__"):
            module.__package__ = task.main_module.removesuffix(".__main__")
    # multiprocessing then finds the script again by its path, as under plain Python.
    module.__spec__ = None
    # Before it runs, as in any import: a dataclass looks up its own module while it is made.
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module
    _loading.append(task.main_path)
    try:
        loader.exec_module(module)
    finally:
        _loading.pop()
    return module


def loading_main() -> str | None:
    """Return the path of the main script while this rank loads it: what its main guard should keep out runs just then."""
    return _loading[-1] if _loading else None


@contextmanager
def no_app_starts() -> Iterator[None]:
    """Refuse to run a Hydra app while its main script is loaded: without a main guard, ranks would start ranks without end.

    An app that Hydra has decorated calls ``hydra.main._run_hydra``, a private name, and nothing public in between; where that
    changes, every job of a Hydra app fails here, and the test of an app without a main guard tells.
    """
    main = sys.modules["hydra.main"]

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(f'{loading_main()} runs its app when it is imported: put the call under if __name__ == "__main__":')

    run = main._run_hydra
    main._run_hydra = refuse  # type: ignore[attr-defined]
    try:
        yield
    finally:
        main._run_hydra = run  # type: ignore[attr-defined]

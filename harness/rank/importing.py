"""Doing something when a module is imported, without importing it for that."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` once ``name`` has been imported, at once if it has been; return what takes that back."""
    if name in sys.modules:
        action()
        return lambda: None

    @contextmanager
    def then_act() -> Iterator[None]:
        yield
        # Not in a finally block: an import that failed has left nothing to act on.
        action()

    finder = _Finder(name, then_act)
    # In front: a finder that knows the module would answer first, and nobody behind it is asked.
    sys.meta_path.insert(0, finder)
    return finder.withdraw


def import_quickly(*names: str) -> None:
    """Have modules be imported, if they are, without the garbage collector looking through them again and again meanwhile.

    What an import makes, it keeps; of the time that torch takes, an eighth is the collector's (measured).
    """
    for name in names:
        if name not in sys.modules:
            sys.meta_path.insert(0, _Finder(name, uncollected))


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Finder(MetaPathFinder):
    def __init__(self, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._name = name
        self._around = around

    def withdraw(self) -> None:
        # It is not there any more once the module has been imported.
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # Else the look for the real loader would come back here.
        self.withdraw()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        # Replaced in this loader alone: Python's finder of paths makes one for each module.
        execute = spec.loader.exec_module

        def execute_within(module: ModuleType) -> None:
            with self._around():
                execute(module)

        spec.loader.exec_module = execute_within  # type: ignore[method-assign]
        return spec

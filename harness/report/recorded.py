"""The reporters that a sweep was run with, made again from what its folder records.

A folder may come from elsewhere, and what it names must not become a program. So a reporter is made again only where all
of this holds; it is left out otherwise, and named:

- ``_target_`` is a class, never a function, found where Python itself looks: not in the folder that is being read, and
  not in the standard library, whose classes take a file's name and write.
- The class has a method ``report(sweep)`` of its own; one without it showed something only while jobs ran.
- Its arguments are plain data: no further ``_target_``, none of Hydra's other keys, no interpolation.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
from harness.errors import ConfigError
from harness.report.reporter import make
from harness.report.sweep.folder import SweepDir
from harness.run.visible import visible

DEFAULT = Path(harness.__file__).parents[1] / "conf" / "report" / "default.yaml"
"""Reporters of a sweep whose folder tells nothing of them: an older one, or one of somebody else's app."""


def recorded_reporters(folder: Path) -> dict[str, Any]:
    """Return the reporters of a sweep by name; one that cannot be made again is named on stderr and left out."""
    made: dict[str, Any] = {}
    for name, node in _chosen(SweepDir(folder).read().get("report")).items():
        try:
            if (reporter := _made_again(name, node, folder)) is not None:
                made[name] = reporter
        except ConfigError as error:
            print(f"{visible(str(error))} The other reports are made.", file=sys.stderr)
    return made


def _chosen(report: Any) -> dict[str, Any]:
    if report is None:
        from omegaconf import OmegaConf

        report = OmegaConf.to_container(OmegaConf.load(DEFAULT))
    nodes = report.get("reporters") if isinstance(report, Mapping) else None
    return {str(name): node for name, node in nodes.items() if node is not None} if isinstance(nodes, Mapping) else {}


def _made_again(name: str, node: Any, folder: Path) -> Any:
    """Return a reporter; None for one that has no report to make.

    Raises:
        ConfigError: It cannot be made, or must not be.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    # Asked before the name is looked up anywhere.
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise ConfigError(f"report.reporters.{name} is not made again: its _target_ is no name of a class.")
    for reason in (
        *_foreign(target.partition(".")[0], folder),
        *_not_plain({key: node[key] for key in node if key != "_target_"}),
    ):
        raise ConfigError(f"report.reporters.{name} is not made again: {target} {reason}.")
    if not _is_reporter(name, target):
        return None
    # A single job is spared its pictures at its end, for their cost; whoever calls this asks for them.
    return make(name, {**node, "min_jobs": 1} if "min_jobs" in node else node)


def _foreign(package: str, folder: Path) -> Iterator[str]:
    # logging.FileHandler and its like would open whatever file a record names.
    if package in sys.stdlib_module_names:
        yield "is of Python's standard library, which has no reporters"
    # Finding does not run the package, as importing would.
    spec = importlib.machinery.PathFinder.find_spec(package)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    if any(place and Path(place).resolve().is_relative_to(folder.resolve()) for place in places):
        yield "lies in the folder that is being read, and a folder of records is never run"


def _not_plain(value: Any) -> Iterator[str]:
    """Yield why arguments are no plain data."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # _target_, _partial_, _args_ and the like: Hydra would call what they name.
            if str(key).startswith("_"):
                yield f"has an argument with {key}, and arguments of a recorded reporter are plain data"
            yield from _not_plain(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _not_plain(inner)
    elif isinstance(value, str) and "${" in value:
        yield "has an argument that is to be interpolated, and arguments of a recorded reporter are plain data"


def _is_reporter(name: str, target: str) -> bool:
    """Return whether a class has a report to make.

    Raises:
        ConfigError: It cannot be imported, or is no class that takes a sweep.
    """
    from hydra.utils import get_object

    try:
        # This runs the user's module, after all that can be asked of a name has been asked.
        kind = get_object(target)
    except Exception as error:  # a module of the user's may raise whatever it likes
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"report.reporters.{name} is not made again: {target} cannot be imported ({reason}).") from error
    if not inspect.isclass(kind):
        raise ConfigError(f"report.reporters.{name} is not made again: {target} is no class, and only classes are.")
    # Static: plain getattr would run a metaclass's or a descriptor's code.
    report = inspect.getattr_static(kind, "report", None)
    if report is None:
        return False
    if not inspect.isfunction(report) or len(inspect.signature(report).parameters) != 2:
        raise ConfigError(f"report.reporters.{name} is not made again: {target} has no report(sweep).")
    return True

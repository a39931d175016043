"""A function by reference: how the parent names it, and how a rank finds it again under whatever decorators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from harness.errors import ConfigError
from harness.rank.main_script import describe_main
from harness.run.plan import Task

_here: dict[str, Callable[..., Any]] = {}


def describe_function(function: Callable[..., Any], inline: bool = False) -> Task:
    """Return how a rank finds ``function`` again.

    Args:
        inline: True where the rank is this process, which needs no name for it.

    Raises:
        ConfigError: It cannot be found by name (a lambda, a nested function, a program read from standard input).
    """
    name, module = getattr(function, "__qualname__", repr(function)), getattr(function, "__module__", "")
    path, main_module = describe_main()
    if inline:
        _here[name] = function
        return Task("hydra", path, main_module, name=name)
    if module == "__main__" and path is None:
        raise ConfigError(
            f"{name} cannot be loaded in the ranks: it was typed in, or read from standard input. Save it as a file."
        )
    # Its own module first, which decorators may name wrongly; then whoever else has it.
    for holder in dict.fromkeys([module, "__main__", *sys.modules]):
        for attribute, index, candidate in _candidates(sys.modules.get(holder)):
            # By identity: functools.wraps gives the wrapper the name of what it wraps.
            if candidate is function:
                return Task("hydra", path, main_module, holder, name, _line_of(function), attribute, index)
    raise ConfigError(
        f"{name} ({module}) cannot be loaded in the ranks: it is a lambda or lies inside another function. "
        "Move it to the top level of its module."
    )


def find_function(task: Task) -> Callable[..., Any]:
    """Return the function itself, under whatever decorators its module has put around it.

    Raises:
        ConfigError: The module has no such function any more.
    """
    if not task.module:
        return _here[task.name]
    for attribute, index, candidate in _candidates(sys.modules[task.module]):
        # Line and index besides the name: one name may lead to several functions of one decorator.
        is_there = (attribute, index, _line_of(candidate)) == (task.attribute, task.index, task.line)
        if is_there and getattr(candidate, "__qualname__", task.name) == task.name:
            return candidate
    raise ConfigError(
        f"{task.name} (line {task.line}) is not in {task.module} when a rank loads it. Has the file changed, "
        "or is it defined under the main guard? Move it to the top level."
    )


def _candidates(module: ModuleType | None) -> Iterator[tuple[str, int, Callable[..., Any]]]:
    """Yield what a module's names lead to: the name, how deep under it, and the function."""
    # Of a copy: what is looked at may load lazily, and so add to its module meanwhile.
    for attribute, value in list(vars(module).items()) if module is not None else ():
        for index, function in enumerate(_unwrapped(value, set())):
            yield attribute, index, function


def _unwrapped(value: Any, seen: set[int]) -> Iterator[Callable[..., Any]]:
    """Yield a function and all that its decorators hide, with functools.wraps or without.

    A decorator of the user's own, written without ``wraps``, keeps the function in its closure and nowhere else.
    """
    # A class is callable and no task, but its attributes would lead to every method. By id, as not all that is callable
    # can be hashed.
    if not callable(value) or isinstance(value, type) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    # wraps() keeps it in __wrapped__, partial() in func, and a decorator that is a class in an attribute of its own choice.
    inner = [getattr(value, "__wrapped__", None), getattr(value, "func", None)]
    inner += [_cell(cell) for cell in getattr(value, "__closure__", None) or ()]
    inner += getattr(value, "__dict__", {}).values()
    for candidate in inner:
        yield from _unwrapped(candidate, seen)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # A cell that nothing has been put into yet.
        return None


def _line_of(function: Any) -> int:
    return int(getattr(getattr(function, "__code__", None), "co_firstlineno", 0))

"""What can be carried to another process, and from where: the call that ``spawn`` hands to its ranks."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import ConfigError
from harness.rank.main_script import describe_main, loading_main

_GUARD = (
    'Put the call of spawn() under `if __name__ == "__main__":` in {path}: every rank loads that file to find the function, '
    "and would call spawn() again."
)


@dataclass(frozen=True)
class Call:
    """A function and its arguments, pickled; ``refers_to_main`` where the main module defines anything in them."""

    content: bytes
    refers_to_main: bool


class _Pickler(pickle.Pickler):
    """Notes whether a class or function of the main module is pickled, which is by its name alone."""

    refers_to_main = False

    def reducer_override(self, obj: Any) -> Any:
        # Asked of functions and classes too, before pickle puts down their names.
        # Instances have their class's __module__ as well, but no __qualname__.
        if getattr(obj, "__module__", None) == "__main__" and hasattr(obj, "__qualname__"):
            self.refers_to_main = True
        return NotImplemented


def pickled(value: Any) -> Call:
    """Return ``value`` by value."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)
    return Call(content.getvalue(), pickler.refers_to_main)


def pickle_call(func: Callable[..., Any], args: Sequence[Any]) -> Call:
    """Return a call by value: tensors are copied, and no file descriptor or shared memory is used.

    Raises:
        ConfigError: The function or an argument cannot be pickled, or they do not fit each other.
    """
    if not callable(func):
        raise ConfigError(f"spawn() needs a function as its first argument, and got {func!r}.")
    if not isinstance(args, tuple | list):
        raise ConfigError(f"args={_short(args)} must be a tuple of the function's arguments: args=({_short(args)},).")
    _require_fitting(func, args)
    # By itself first, so that the message says which of the two is at fault.
    try:
        pickle.dumps(func)
    except Exception as error:
        raise ConfigError(
            f"spawn() cannot hand {name_of(func)} to its ranks: {_why(func, error)}. "
            "Define it with def at the top level of a module."
        ) from error
    try:
        # In one pickle: what function and arguments share stays one object in the rank.
        return pickled((func, tuple(args)))
    except Exception as error:
        number, value = next(((i, v) for i, v in enumerate(args) if not _can_be_pickled(v)), (0, args))
        raise ConfigError(
            f"spawn() cannot hand args[{number}] (a {type(value).__name__}) to its ranks: it cannot be pickled ({error}). "
            "Make it in the function instead."
        ) from error


def _require_fitting(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """See to it that the function can be called with these arguments; those from elsewhere expect a rank first."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        # Of a function written in C there may be none to look at.
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise ConfigError(
            f"{name_of(func)}{signature} cannot be called with the {len(args)} arguments of args: {error}. "
            "spawn() adds no rank: the function asks harness.get_rank() for it."
        ) from None


def _why(func: Any, error: Exception) -> str:
    name = getattr(func, "__qualname__", "")
    if name.endswith("<lambda>"):
        return "it is a lambda"
    if "<locals>" in name:
        return "it is defined inside another function"
    return str(error)


def name_of(func: Any) -> str:
    """Return a function's name as its author wrote it."""
    return str(getattr(func, "__qualname__", None) or _short(func)).rpartition(".<locals>.")[2]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def main_of(call: Call) -> tuple[str | None, str | None]:
    """Return path and module name of the main script that ranks have to load for a call; None where they need none.

    The ``__main__.py`` of a package does its work when it is loaded, so it is left alone unless the call refers to it, as
    Python's own multiprocessing does.
    """
    path, module = describe_main()
    if path is not None and os.path.basename(path) == "__main__.py" and not call.refers_to_main:
        return None, None
    return path, module


def require_guard() -> None:
    """Refuse a call that a rank comes to while it loads the main script, whose main guard should have kept it out.

    Raises:
        ConfigError: The call is such a one.
    """
    loading = loading_main()
    if loading is not None:
        raise ConfigError(_GUARD.format(path=os.path.basename(loading)))


def require_no_group() -> None:
    """Refuse to fork a process that has joined a process group.

    Raises:
        ConfigError: It has.
    """
    # Not imported to find out: a process without it has joined no group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ConfigError(
            "start_method=fork would copy the process group that this process has joined into its ranks. "
            "Use start_method='forkserver', or call spawn() before init_parallel_env()."
        )

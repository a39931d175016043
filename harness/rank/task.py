"""What a rank does: a Hydra app's function, a pickled call, or somebody's script; found again by reference."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import pickle
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import ConfigError
from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir, write_whole
from harness.run.plan import RunPlan, Task
from harness.run.recorder import Recorder

_loading: list[str] = []
_here: dict[str, Callable[..., Any]] = {}


def run_task(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    """Do the task of ``plan`` in this rank and return its value."""
    match plan.task.kind:
        case "hydra":
            return _run_hydra(run, plan, who, record)
        case "call":
            _run_call(run, plan, who, record)
        case "script" | "module":
            _run_script(plan, who, record)
    return None


def _run_call(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> None:
    """Call the pickled function and keep what it returns, which is what its caller wants."""
    if who.rank > 0:
        forward_records(record)
        forward_warnings(record)
    load_main(plan.task)
    function, arguments = pickle.loads(run.call.read_bytes())
    record.mark("task loaded")
    value = function(*arguments)
    if value is None:
        return
    try:
        content = pickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"what {getattr(function, '__qualname__', function)} returned (a {type(value).__name__}) cannot be pickled, so it "
            f"cannot reach the caller of spawn(): {error}. Return numbers, tensors or other plain data."
        ) from error
    write_whole(run.value(who.rank), content)


def _run_script(plan: RunPlan, who: RankEnvironment, record: Recorder) -> None:
    """Run a script, or a module as a script, to its end; ``sys.exit(0)`` is an end like any other."""
    if who.rank > 0:
        forward_records(record)
        forward_warnings(record)
    try:
        if plan.task.kind == "module":
            sys.argv[:] = [plan.task.module, *plan.task.arguments]
            runpy.run_module(plan.task.module, run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = [plan.task.path, *plan.task.arguments]
            if not os.path.isdir(plan.task.path):
                sys.path.insert(0, str(Path(plan.task.path).resolve().parent))
            runpy.run_path(plan.task.path, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def _run_hydra(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import configure_log, setup_globals

    setup_globals()
    # The configuration may hold types that the main script defines, and resolvers that it registers.
    with _no_app_starts():
        load_main(plan.task)
    if plan.task.module not in ("", "__main__", "__mp_main__"):
        importlib.import_module(plan.task.module)
    configs = pickle.loads(run.config.read_bytes())
    HydraConfig.instance().set_config(configs["hydra"])
    hydra = HydraConfig.get()
    os.chdir(plan.cwd)
    if hydra.job.chdir:
        os.chdir(hydra.runtime.output_dir)
    name_rank_in_logs(who.rank)
    configure_log(configs["hydra"].hydra.job_logging, hydra.verbose)
    if who.rank > 0:
        forward_logs(record)
        forward_warnings(record, who.rank)
    function = find_function(plan.task)
    record.mark("task loaded")
    return function(configs["task"])


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
    for holder in dict.fromkeys([module, "__main__", *sys.modules]):
        for attribute, index, candidate in _candidates(sys.modules.get(holder)):
            if candidate is function:
                return Task("hydra", path, main_module, holder, name, _line_of(function), attribute, index)
    raise ConfigError(
        f"{name} ({module}) cannot be loaded in the ranks: it is a lambda or lies inside another function. "
        "Move it to the top level of its module."
    )


def describe_main() -> tuple[str | None, str | None]:
    """Return path and module name of this process's ``__main__``; None for what it does not have."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
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
    if task.main_module is not None:
        module.__package__ = task.main_module.removesuffix(".__main__").rpartition(".")[0]
        if task.main_module.endswith(".__main__"):
            module.__package__ = task.main_module.removesuffix(".__main__")
    # multiprocessing then finds the script again by its path, as under plain Python.
    module.__spec__ = None
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module
    _loading.append(task.main_path)
    try:
        loader.exec_module(module)
    finally:
        _loading.pop()
    return module


@contextmanager
def _no_app_starts() -> Iterator[None]:
    """Refuse to run a Hydra app while its main script is loaded: without a main guard, ranks would start ranks without end."""
    main = sys.modules["hydra.main"]

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(f'{loading_main()} runs its app when it is imported: put the call under if __name__ == "__main__":')

    run = main._run_hydra
    main._run_hydra = refuse  # type: ignore[attr-defined]
    try:
        yield
    finally:
        main._run_hydra = run  # type: ignore[attr-defined]


def loading_main() -> str | None:
    """Return the path of the main script while this rank loads it: what its main guard should keep out runs just then."""
    return _loading[-1] if _loading else None


def find_function(task: Task) -> Callable[..., Any]:
    """Return the function itself, under whatever decorators its module has put around it.

    Raises:
        ConfigError: The module has no such function any more.
    """
    if not task.module:
        return _here[task.name]
    for attribute, index, candidate in _candidates(sys.modules[task.module]):
        same = (attribute, index, _line_of(candidate)) == (task.attribute, task.index, task.line)
        if same and getattr(candidate, "__qualname__", task.name) == task.name:
            return candidate
    raise ConfigError(
        f"{task.name} (line {task.line}) is not in {task.module} when a rank loads it. Has the file changed, "
        "or is it defined under the main guard? Move it to the top level."
    )


def _candidates(module: ModuleType | None) -> Iterator[tuple[str, int, Callable[..., Any]]]:
    """Yield what a module's names lead to: the name, how deep under it, and the function."""
    for attribute, value in list(vars(module).items()) if module is not None else ():
        for index, function in enumerate(_unwrapped(value, set())):
            yield attribute, index, function


def _unwrapped(value: Any, seen: set[int]) -> Iterator[Callable[..., Any]]:
    """Yield a function and all that its decorators hide, with functools.wraps or without."""
    if not callable(value) or isinstance(value, type) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    inner = [getattr(value, "__wrapped__", None), getattr(value, "func", None)]
    inner += [_cell(cell) for cell in getattr(value, "__closure__", None) or ()]
    inner += getattr(value, "__dict__", {}).values()
    for candidate in inner:
        yield from _unwrapped(candidate, seen)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _line_of(function: Any) -> int:
    return int(getattr(getattr(function, "__code__", None), "co_firstlineno", 0))


def name_rank_in_logs(rank: int) -> None:
    """Put this rank's number before the text of every log record."""
    make = logging.getLogRecordFactory()

    def make_with_rank(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg = f"[rank {rank}] {record.msg}"
        record.__dict__["rank"] = rank
        return record

    logging.setLogRecordFactory(make_with_rank)


def forward_logs(record: Recorder) -> None:
    """Let the parent's console show what the console handlers of this rank write to its log."""
    for logger in [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]:
        for handler in list(logger.handlers):
            if getattr(handler, "stream", None) in (sys.stdout, sys.stderr):
                logger.addHandler(_Forward(handler, record))


def forward_records(record: Recorder) -> None:
    """Let the parent's console show this rank's log records from WARNING on, whatever the script logs to."""
    make = logging.getLogRecordFactory()

    def make_and_forward(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        if made.levelno >= logging.WARNING:
            record.log(made.levelname, made.getMessage())
        return made

    logging.setLogRecordFactory(make_and_forward)


def forward_warnings(record: Recorder, rank: int | None = None) -> None:
    """Let the parent's console show this rank's warnings.

    Args:
        rank: This rank's number, where the parent shows what it gets word for word; None where it adds that itself.
    """
    show = warnings.showwarning

    def show_and_forward(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        kind = category.__name__
        record.log(kind, str(message) if rank is None else f"[rank {rank}] {kind}: {message}")
        show(message, category, *rest, **named)

    warnings.showwarning = show_and_forward


class _Forward(logging.Handler):
    def __init__(self, twin: logging.Handler, record: Recorder) -> None:
        super().__init__(twin.level)
        self._twin = twin
        self._record = record

    def filter(self, record: logging.LogRecord) -> bool:
        return bool(self._twin.filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        self._record.log(record.levelname, self._twin.format(record))

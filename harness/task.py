"""What a rank does: a Hydra app's function, a pickled call, or somebody's script; found again by reference."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.environ import RankEnvironment
from harness.errors import ConfigError
from harness.plan import RunPlan, Task
from harness.recorder import Recorder
from harness.rundir import RunDir


def run_task(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    """Do the task of ``plan`` in this rank and return its value."""
    match plan.task.kind:
        case "hydra":
            return _run_hydra(run, plan, who, record)
        case "call":
            load_main(plan.task)
            function, arguments = pickle.loads(run.call.read_bytes())
            return function(*arguments)
        case "script":
            sys.argv[:] = [plan.task.path, *plan.task.arguments]
            sys.path.insert(0, str(Path(plan.task.path).resolve().parent))
            runpy.run_path(plan.task.path, run_name="__main__")
        case "module":
            sys.argv[:] = [plan.task.module, *plan.task.arguments]
            runpy.run_module(plan.task.module, run_name="__main__", alter_sys=True)
    return None


def _run_hydra(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import configure_log, setup_globals

    setup_globals()
    # The configuration may hold types that the main script defines, and resolvers that it registers.
    load_main(plan.task)
    if plan.task.module not in ("__main__", "__mp_main__"):
        importlib.import_module(plan.task.module)
    configs = pickle.loads(run.config.read_bytes())
    HydraConfig.instance().set_config(configs["hydra"])
    hydra = HydraConfig.get()
    os.chdir(plan.cwd)
    if hydra.job.chdir:
        os.chdir(hydra.runtime.output_dir)
    name_rank_in_logs(who.rank)
    configure_log(hydra.job_logging, hydra.verbose)
    if who.rank > 0:
        forward_logs(record)
    function = find_function(plan.task)
    record.mark("task loaded")
    return function(configs["task"])


def describe_function(function: Callable[..., Any]) -> Task:
    """Return how a rank finds ``function`` again.

    Raises:
        ConfigError: It cannot be found by name (a lambda, a nested function, a program read from standard input).
    """
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    path, main_module = describe_main()
    task = Task(
        kind="hydra", main_path=path, main_module=main_module, module=module, name=name, line=_line_of(function)
    )
    if module == "__main__" and path is None:
        raise ConfigError(
            f"{name} cannot be loaded in the ranks: it was read from standard input or typed in. Save it as a file and run that."
        )
    if not any(candidate is function for candidate in _candidates(sys.modules[module], task)):
        raise ConfigError(
            f"{name} ({module}) cannot be loaded in the ranks: it is a lambda or lies inside another function. "
            "Move it to the top level of its module."
        )
    return task


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
    spec = importlib.util.spec_from_file_location("__mp_main__", task.main_path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{task.main_path} cannot be loaded in the ranks: it is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    if task.main_module is not None:
        module.__package__ = task.main_module.removesuffix(".__main__").rpartition(".")[0]
        if task.main_module.endswith(".__main__"):
            module.__package__ = task.main_module.removesuffix(".__main__")
        module.__spec__ = None
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


def find_function(task: Task) -> Callable[..., Any]:
    """Return the function itself, under whatever decorators its module has put around it.

    Raises:
        ConfigError: The module has no such function any more.
    """
    for candidate in _candidates(sys.modules[task.module], task):
        return candidate
    raise ConfigError(f"{task.name} is not in {task.module} (line {task.line}) when a rank loads it: did the file change?")


def _candidates(module: ModuleType, task: Task) -> Iterator[Callable[..., Any]]:
    for value in list(vars(module).values()):
        for function in _unwrapped(value, set()):
            if (getattr(function, "__qualname__", None), _line_of(function)) == (task.name, task.line):
                yield function


def _unwrapped(value: Any, seen: set[int]) -> Iterator[Callable[..., Any]]:
    """Yield a function and all that its decorators hide, with functools.wraps or without."""
    if not callable(value) or isinstance(value, type) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    inner = [getattr(value, "__wrapped__", None)]
    inner += [_cell(cell) for cell in getattr(value, "__closure__", None) or ()]
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
            if type(handler) is logging.StreamHandler:
                logger.addHandler(_Forward(handler, record))


class _Forward(logging.Handler):
    def __init__(self, twin: logging.Handler, record: Recorder) -> None:
        super().__init__(twin.level)
        self._twin = twin
        self._record = record

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        return self._twin.filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        self._record.log(record.levelname, self._twin.format(record))

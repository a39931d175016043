"""What a rank does: a Hydra app's function, a pickled call, or somebody's script; found again by reference."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.rank.context import current
from harness.rank.function_reference import find_function
from harness.rank.log_forwarding import forward_logs, forward_records, forward_warnings, name_rank_in_logs
from harness.rank.main_script import load_main, no_app_starts
from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir, write_whole
from harness.run.plan import RunPlan
from harness.run.recorder import Recorder


def run_task(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    """Do the task of ``plan`` in this rank and return its value."""
    match plan.task.kind:
        case "hydra" | "train":
            return _run_app(run, plan, who, record)
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
    # After the main script: the pickle names functions and types of it.
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
            # alter_sys: pickles look for the script's own types in sys.modules; run_path() below does the same unasked.
            runpy.run_module(plan.task.module, run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = [plan.task.path, *plan.task.arguments]
            if not os.path.isdir(plan.task.path):
                # As under python train.py; runpy does it for folders alone.
                sys.path.insert(0, str(Path(plan.task.path).resolve().parent))
            runpy.run_path(plan.task.path, run_name="__main__")
    except SystemExit as leaving:
        # As an end of the process it would skip what a rank still has to record.
        if leaving.code not in (None, 0):
            raise


def _run_app(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import configure_log, setup_globals

    # The resolvers ${now:...} and ${hydra:...}, which in the parent Hydra's own start registers.
    setup_globals()
    # The configuration may hold types that the main script defines, and resolvers that it registers.
    with no_app_starts():
        load_main(plan.task)
    if plan.task.kind == "hydra" and plan.task.module not in ("", "__main__", "__mp_main__"):
        importlib.import_module(plan.task.module)
    configs = pickle.loads(run.config.read_bytes())
    HydraConfig.instance().set_config(configs["hydra"])
    hydra = HydraConfig.get()
    os.chdir(plan.cwd)
    if hydra.job.chdir:
        os.chdir(hydra.runtime.output_dir)
    name_rank_in_logs(who.rank)
    configure_log(configs["hydra"].hydra.job_logging, hydra.verbose)
    # After configure_log(), which makes the console handlers whose records are forwarded.
    if who.rank > 0:
        forward_logs(record)
        forward_warnings(record, who.rank)
    if plan.task.kind == "train":
        # What is trained, the plan alone says: the configuration that it came from is handed to nobody.
        function, argument = getattr(importlib.import_module(plan.task.module), plan.task.name), current()
    else:
        function, argument = find_function(plan.task), configs["task"]
    record.mark("task loaded")
    return function(argument)

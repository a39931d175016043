"""One rank, from its first line to its last: ``python -m harness.rank RUN_DIR`` under RANK, WORLD_SIZE and their kin.

Whatever started it, a rank reads ``plan.json``, does the task, and leaves ``rank-N.jsonl`` and ``rank-N.log``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from harness.context import Rank, enter
from harness.environ import PARENT, RUN_DIR, RankEnvironment
from harness.lifetime import die_with_parent
from harness.plan import RunPlan
from harness.recorder import Recorder, failure_of
from harness.rundir import RunDir
from harness.store import offer_store
from harness.task import run_task


def main(path: str, forked: bool = False) -> int:
    """Run this rank to its end and return its exit code; in a process of its own, leave by ``os._exit`` with it.

    Args:
        path: The run's folder.
        forked: True where this process is a copy of one that had modules and random generators already.
    """
    entered = time.monotonic()
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    run = RunDir(path)
    who = RankEnvironment.read() or RankEnvironment()
    os.environ[RUN_DIR] = str(run.path)
    _redirect_output(run, who.rank)
    with open(run.rank_stacks(who.rank), "w") as stacks, Recorder(run.records(who.rank)) as record:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        record.start(os.getpid(), entered)
        plan = RunPlan.read(run)
        _prepare(plan, forked)
        return conclude(lambda: work(run, plan, who, record), run, who.rank, record)


def work(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    """Agree on a rendezvous, then do the task and return its value."""
    offer_store(run, who)
    enter(Rank(run, plan, who, record))
    return run_task(run, plan, who, record)


def conclude(work: Callable[[], Any], run: RunDir, rank: int, record: Recorder) -> int:
    """Do the work, meet the other ranks, record how it ended, and return the exit code."""
    try:
        value = work()
        _meet_others(record)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        record.end("exit", code)
        return code
    except BaseException as error:
        failure = failure_of(error)
        print(failure.traceback, file=sys.stderr, flush=True)
        record.error(run.error(rank), error)
        record.end("raised", 1, failure=failure)
        return 1
    record.value(run.value(rank), value)
    record.end("ok", 0, value=value)
    return 0


def _prepare(plan: RunPlan, forked: bool) -> None:
    """Make this process what a fresh interpreter of the parent's would be."""
    os.environ.update(plan.settings)
    sys.argv[:] = plan.argv
    sys.path[:] = list(dict.fromkeys([*plan.sys_path, *(entry for entry in sys.path if not plan.sys_path)]))
    if forked:
        _forget_the_server(plan.threads)


def _forget_the_server(threads: int) -> None:
    """Undo what every rank would share with the server it was forked from: thread counts and numpy's random stream."""
    if "threadpoolctl" in sys.modules:
        sys.modules["threadpoolctl"].threadpool_limits(threads, user_api="blas")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def _redirect_output(run: RunDir, rank: int) -> None:
    """Send stdout and stderr, of C code too, to ``rank-N.log``, a whole line at a time."""
    log = os.open(run.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def _meet_others(record: Recorder) -> None:
    """Wait for the ranks that still work: a process group that goes away under them would fail them."""
    record.mark("finished")
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() > 1:
        distributed.barrier()
    record.mark("met")


def leave(code: int) -> None:
    """End this process at once: tearing down an interpreter with a process group takes seconds, and can hang."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    # The module that a task imports as harness.rank must be this one.
    sys.modules["harness.rank"] = sys.modules["__main__"]
    leave(main(sys.argv[1]))

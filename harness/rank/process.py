"""One rank, from its first line to its last: ``python -m harness.rank RUN_DIR`` under RANK, WORLD_SIZE and their kin.

Whatever started it, a rank reads ``plan.json``, does the task, and leaves ``rank-N.jsonl`` and ``rank-N.log``.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import WrongSettings
from harness.rank.context import Rank, inhabited
from harness.rank.group import leave_group
from harness.rank.importing import import_quickly, when_imported
from harness.rank.lifetime import children_die_with_this_process, die_with_parent, used_by_multiprocessing
from harness.rank.store import keep_store, offer_store
from harness.rank.task import run_task
from harness.run.environment import PARENT, RUN_DIR, RankEnvironment, common_environment, usable_cores
from harness.run.folder import RunDir
from harness.run.plan import RunPlan
from harness.run.recorder import Recorder, failure_of

_held: list[object] = []
"""The group that this process has left: held until the process ends by ``os._exit``, so that nothing waits for its threads."""


def main(path: str, forked: bool = False) -> NoReturn:
    """Run this rank to its end, and end this process with its exit code.

    Args:
        path: The run's folder.
        forked: True where this process is a copy of one that had modules and random generators already.
    """
    code = 1
    try:
        code = run_rank(path, forked)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def run_rank(path: str, forked: bool) -> int:
    """Run this rank to its end and return its exit code."""
    entered = time.monotonic()
    _default_signals()
    import_quickly("torch", "torch._dynamo")
    # A rank that was started by hand has none, and may outlive its shell.
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    children_die_with_this_process()
    if forked:
        _forget_exit_functions()
    run = RunDir(path)
    who = RankEnvironment.read() or RankEnvironment()
    _redirect_output(run, who.slot)
    with run.rank_stacks(who.slot).open("w") as stacks, Recorder(run.records(who.slot)) as record:
        faulthandler.enable()
        # In C, within the signal's handler: it answers also where the main thread waits in C, and never comes back to Python.
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        record.start(os.getpid(), entered)
        plan = RunPlan.read(run)

        # Preparing is part of the work: a working folder that is gone is this rank's failure, and is recorded as one.
        def prepare_and_work() -> Any:
            with using_temp_dir(run):
                _prepare(run, plan, forked)
                return work(run, plan, who, record)

        return conclude(prepare_and_work, run, who, record)


def _forget_exit_functions() -> None:
    """Drop what the process that this one was forked from wants done at its own end."""
    # Private, but there is no public way to forget functions that are not at hand; without it every forked rank fails at once.
    atexit._clear()
    # Of these the rank needs one as well: it ends children that are daemons, as DataLoader's workers are.
    if "multiprocessing.util" in sys.modules:
        atexit.register(sys.modules["multiprocessing.util"]._exit_function)


@contextmanager
def using_temp_dir(run: RunDir) -> Iterator[None]:
    """Use the run's temporary folder here and in forked children; a rank started by hand has none, or one of old."""
    folder = Path(run.temp_dir.read_text()) if run.temp_dir.exists() else None
    with used_by_multiprocessing(folder) if folder is not None and folder.is_dir() else nullcontext():
        yield


def _default_signals() -> None:
    """Undo what the parent, or the shell of a background job, has set: an ignored SIGTERM would delay every stop."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def work(run: RunDir, plan: RunPlan, who: RankEnvironment, record: Recorder) -> Any:
    """Agree on a rendezvous, then do the task and return its value."""
    if who.is_on_one_machine:
        offer_store(run, who, plan.master_port)
    with inhabited(Rank(run, plan, who, record)):
        return run_task(run, plan, who, record)


def conclude(work: Callable[[], Any], run: RunDir, who: RankEnvironment, record: Recorder) -> int:
    """Do the work, part from the other ranks, record how it ended, and return the exit code."""
    try:
        try:
            value = work()
        finally:
            _leave_to_the_rank(record)
        _part(run, who.rank, who.world_size, record)
        record.value(run.value(who.slot), value)
    except SystemExit as leaving:
        code = exit_status(leaving.code)
        # As Python does at the end of a program: sys.exit("text") prints the text, and the status is 1.
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
        record.end("exit", code, value=leaving.code)
        return code
    except BaseException as error:
        plan = RunPlan.read(run)
        if isinstance(error, WrongSettings):
            error.words = plan.words
        failure = failure_of(error, plan.cwd)
        if not run.call.exists() and not (failure.mistake and PARENT in os.environ):
            # The caller of spawn() gets the traceback with the exception; a parent says itself what there is to mend.
            if failure.collective and who.world_size > 1:
                print(f"Rank {who.rank} lost another rank, and is seldom the one at fault:", file=sys.stderr)
            print(failure.traceback, file=sys.stderr, flush=True)
        # Before the end, after which nobody looks for more.
        record.error(run.error(who.slot), error)
        record.end("raised", 1, failure=failure)
        return 1
    record.end("ok", 0, value=value)
    return 0


def _leave_to_the_rank(record: Recorder) -> None:
    """End a process that the task has forked and that comes back from it: how the rank ends is not its to say."""
    if os.getpid() == record.owner:
        return
    # Within the finally block that calls this, it is what the task was left by; None where it has returned.
    leaving = sys.exc_info()[1]
    if leaving is not None and not isinstance(leaving, SystemExit):
        traceback.print_exception(leaving)
    sys.stdout.flush()
    os._exit(0 if leaving is None else exit_status(leaving.code) if isinstance(leaving, SystemExit) else 1)


def exit_status(code: object) -> int:
    """Return the status of a process that calls ``sys.exit(code)``; a code that its low byte would turn into 0 is 1."""
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFF or int(code != 0)


def _prepare(run: RunDir, plan: RunPlan, forked: bool) -> None:
    """Make this process what a fresh interpreter of the parent's would be."""
    if os.environ.get(RUN_DIR) != str(run.path):
        # Started by hand, in a debugger.
        os.environ.update(common_environment(os.environ, plan, run.path))
    os.chdir(plan.cwd or ".")
    sys.argv[:] = plan.argv
    # The parent's alone, where it gave any: an entry of this process's own could hide a module of the user's.
    sys.path[:] = list(dict.fromkeys([*plan.sys_path, *(entry for entry in sys.path if not plan.sys_path)]))
    set_threads(plan.threads)
    if forked and "numpy" in sys.modules:
        # Every rank would share the server's stream.
        sys.modules["numpy"].random.seed()


def set_threads(threads: int) -> Callable[[], None]:
    """Set the thread counts of math libraries, now or once they are imported; return what takes the latter back.

    From the environment torch takes one thread per physical core at most, so two ways to start would differ.
    """
    if "threadpoolctl" in sys.modules:
        # OpenBLAS makes no more when it reads the environment.
        sys.modules["threadpoolctl"].threadpool_limits(min(threads, usable_cores()), user_api="blas")
    return when_imported("torch", lambda: sys.modules["torch"].set_num_threads(threads))


def _redirect_output(run: RunDir, rank: int) -> None:
    """Send stdout and stderr, of C code too, to ``rank-N.log``, a whole line at a time."""
    # O_APPEND: the rank, its C code and what it forks write to one file, and none over another's lines.
    log = os.open(run.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    # New ones: those of a forked parent may have been replaced, or lead elsewhere.
    sys.stdout, sys.stderr = _line_stream(1), _line_stream(2)


def _line_stream(descriptor: int) -> io.TextIOWrapper:
    # closefd=False: a stream that is replaced and collected must not take descriptor 1 or 2 along.
    # backslashreplace: a name with a byte that is no text can be printed, and fails no rank.
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _part(run: RunDir, rank: int, world_size: int, record: Recorder) -> None:
    """Part from the ranks that still work.

    Not by a barrier: it would pair with a barrier that a rank is in whose others have left it. A rank that still waits for
    this one hears of a closed connection instead, which fails the run.
    """
    record.mark("finished")
    torch = sys.modules.get("torch")
    # A kernel that still runs may fail, and would do so when nobody asks any more: the rank would pass for a good one.
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    # Rank 0 stays on to serve the store, and so has to close its connections itself. Those of others close with their process.
    if rank == 0 and world_size > 1:
        _held.append(leave_group())
        keep_store(run, world_size)


def leave(code: int) -> NoReturn:
    """End this process as Python does, short of tearing down the interpreter: with a process group that can hang."""
    try:
        # What Python itself calls at its end: threads that are no daemons are waited for, then exit functions run.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)

"""``inline``: one rank in this process, for a debugger."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from harness.launchers.base import Process, rank_environment
from harness.launchers.signals import interruptible
from harness.rank.lifetime import children_die_with_this_process, used_by_multiprocessing
from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir
from harness.run.plan import RunPlan


class InlineLauncher:
    """Runs the one rank before ``start`` returns; environment, folder and streams are as before afterwards."""

    def start(self, run: RunDir, plan: RunPlan, environment: Mapping[str, str]) -> Sequence[Process]:
        """Run the rank to its end."""
        from harness.rank.group import leave_group
        from harness.rank.process import conclude, work
        from harness.rank.store import withdraw_store
        from harness.run.recorder import Recorder

        # The main script is this very process: nothing is to be loaded a second time.
        here = dataclasses.replace(plan, task=dataclasses.replace(plan.task, main_path=None))
        # Rank 0 of 1, whatever the environment of this process says.
        who = RankEnvironment()
        with (
            interruptible(),
            _as_rank(environment, plan.threads),
            Recorder(run.records(0)) as record,
            run.log(0).open("a") as log,
            _tee(log),
            used_by_multiprocessing(Path(run.temp_dir.read_text()), outlives_it=True),
        ):
            record.start(os.getpid(), time.monotonic())
            code = conclude(lambda: work(run, here, who, record), run, who, record)
            # The next job in this process would otherwise find it joined.
            leave_group()
            withdraw_store()
        return [_Done(code)]

    def close(self) -> None:
        """Do nothing: nothing is kept."""


class _Done:
    """The finished rank, as the supervisor sees it."""

    rank: int | None = 0
    server: int | None = None

    def __init__(self, code: int) -> None:
        self.pid = os.getpid()
        self._code = code

    def poll(self) -> int | None:
        return self._code

    def fileno(self) -> int:
        return -1

    def signal(self, number: int) -> None:
        """Do nothing: it has ended, and its process is this one."""

    def kill(self) -> None:
        """Do nothing."""

    def ask_for_stacks(self, pid: int) -> None:
        """Do nothing."""


@contextmanager
def _as_rank(environment: Mapping[str, str], threads: int) -> Iterator[None]:
    from harness.rank.process import set_threads

    before, cwd, path, argv = dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv)
    make_log_record = logging.getLogRecordFactory()
    os.environ.clear()
    os.environ.update(rank_environment(environment, 0, 1))
    torch = sys.modules.get("torch")
    # Where the rank is the first to import torch, there is no count to go back to.
    threads_before = torch.get_num_threads() if torch is not None else 0
    withdraw = set_threads(threads)
    untie = children_die_with_this_process()
    try:
        with _ends_the_rank_alone():
            yield
    finally:
        untie()
        # Where the rank has not imported torch, whoever does later is to have torch's own count.
        withdraw()
        if torch is not None:
            set_threads(threads_before)
        os.environ.clear()
        os.environ.update(before)
        os.chdir(cwd)
        # In place: other modules may hold these very lists.
        sys.path[:], sys.argv[:] = path, argv
        logging.setLogRecordFactory(make_log_record)


@contextmanager
def _ends_the_rank_alone() -> Iterator[None]:
    """Have ``os._exit`` end the rank in place of this process, whose status 0 would pass for the success of every job."""
    end_process, owner = os._exit, (os.getpid(), threading.get_ident())

    def end_rank(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) == owner:
            raise SystemExit(status)
        # A child of the rank ends as it wants; another thread cannot raise here.
        end_process(status if os.getpid() != owner[0] else status or 1)

    os._exit = end_rank
    try:
        yield
    finally:
        os._exit = end_process


class _Tee:
    """Writes to two streams; a debugger's prompt still reaches the terminal."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log: TextIO | None = log

    def write(self, text: str) -> int:
        if self._log is not None:
            self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
        if self._log is not None:
            self._log.flush()

    def part(self) -> None:
        """Write to the first stream alone from now on: whoever took this one for it, such as a log handler, still has it."""
        self._log = None

    # Debuggers and progress bars ask for more than these: isatty(), fileno(), encoding.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _tee(log: TextIO) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    tees = _Tee(before[0], log), _Tee(before[1], log)
    sys.stdout, sys.stderr = tees
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for tee in tees:
            tee.part()

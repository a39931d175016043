"""One supervisor for every launcher: it watches the ranks of a run, stops them, and collects what they recorded."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from harness.errors import HarnessError, aside
from harness.launchers import console
from harness.launchers.base import Process, kill_group
from harness.launchers.signals import Interrupted, SignalTrap, is_pressed
from harness.launchers.stacks import absent_ranks
from harness.launchers.tail import Tail
from harness.launchers.temp_dir import TempDir
from harness.run.folder import RunDir
from harness.run.outcome import End, first_to_fall, judge, listed
from harness.run.plan import RunPlan
from harness.run.record import RankResult, RunResult

TICK_S = 0.1
"""How often records are read while nothing ends: each time costs the ranks a moment of their cores."""
SETTLE_S = 0.5
"""How long a failure that may be a consequence waits for its cause to be heard."""
STACKS_S = 2.0
"""How long ranks may take to write their stacks."""
TEARDOWN_S = 10.0
"""How long a rank that has recorded its end may take to exit."""


class Observer(Protocol):
    """Whoever shows a run while it lasts."""

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take in one event of one rank."""

    def output(self, line: str) -> None:
        """Take in one line that rank 0 printed."""


@dataclass(frozen=True)
class Ending:
    """How a rank's process ended.

    Attributes:
        code: Its exit code, negative for a signal.
        t: When (CLOCK_MONOTONIC, in seconds).
        server: Exit code of the warm server whose death ended it; None where it ended otherwise.
    """

    code: int
    t: float
    server: int | None = None


class Supervisor:
    """Watches one run. What it holds is read again from the run's folder whenever it is asked."""

    def __init__(self, run: RunDir, plan: RunPlan, observer: Observer | None, called: float) -> None:
        self._run = run
        self._plan = plan
        self._observer = observer
        self._marks = {"called": called}
        self._processes: Sequence[Process] = ()
        self._codes: dict[int, int] = {}
        self._endings: dict[int, Ending] = {}
        self._tails = [Tail(run.records(rank)) for rank in range(plan.nprocs)]
        self._output = Tail(run.log(0))
        self._pids: dict[int, int] = {}
        self._unshown: deque[Callable[[], None]] = deque()
        self._finished: set[int] = set()
        self._left: set[int] = set()
        self._joining: set[int] = set()
        self._joined: set[int] = set()
        self._stranding: int | None = None
        self._waiting: list[int] = []
        self._heard = [time.monotonic()] * plan.nprocs
        self._printed = [0] * plan.nprocs
        self._stopped: set[int] = set()
        self._temp_dir: TempDir | None = None
        self._absent: list[int] = []
        self.notes: list[str] = []

    def watch(self, start: Callable[[], Sequence[Process]], timeout: float | None = None) -> RunResult | None:
        """Start the ranks, see them to their end, and return what came out; None if ``timeout`` seconds pass before.

        Raises:
            HarnessError: The ranks cannot be started.
            Interrupted: SIGINT, SIGTERM or SIGHUP came; all ranks are gone.
        """
        with SignalTrap() as trap:
            try:
                if not self._processes:
                    self._start(start)
                is_over = self._until_end(trap, timeout)
                if is_over:
                    self._show_the_rest(trap)
                trap.raise_if_caught()
            except BaseException as error:
                self._stop()
                self._remove_temp_dir()
                if isinstance(error, Interrupted):
                    console.give_up_stalled()
                raise
        if not is_over:
            return None
        self._remove_temp_dir()
        self._marks["returned"] = time.monotonic()
        return self._judge()

    def stop(self) -> None:
        """End all ranks."""
        self._stop()
        self._remove_temp_dir()

    def failed(self, message: str) -> RunResult:
        """Return the result of a run whose ranks could not be started."""
        return RunResult("failed", tuple(end.result for end in self._ends()), message, exit_code=1, marks=self._marks)

    def _start(self, start: Callable[[], Sequence[Process]]) -> None:
        try:
            self._make_temp_dir()
            self._processes = start()
        except OSError as error:
            raise HarnessError(f"the ranks could not be started: {error}.") from error
        self._marks["started"] = time.monotonic()

    def _make_temp_dir(self) -> None:
        """Give the ranks a private folder for what a killed rank cannot remove itself, unless the run's own is one."""
        if self._run.temp_dir.exists():
            return
        self._temp_dir = TempDir()
        self._run.temp_dir.write_text(str(self._temp_dir.path))

    def _remove_temp_dir(self) -> None:
        if self._temp_dir is not None:
            self._run.temp_dir.unlink(missing_ok=True)
            self._temp_dir.close()

    def _until_end(self, trap: SignalTrap, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        settle: float | None = None
        finished: float | None = None
        while True:
            self._read()
            # Not later: while a reader lets this process wait, the ranks are not silent.
            now = time.monotonic()
            self._show(trap)
            trap.raise_if_caught()
            if self._all_ended():
                return True
            if deadline is not None and now > deadline:
                return False
            fallen = first_to_fall(self._ends()) if self._decides and (self._endings or self._finished) else None
            if fallen is not None:
                settle = settle or now + (SETTLE_S if fallen.is_consequence else 0.0)
                if now >= settle or not fallen.is_consequence:
                    if fallen.is_consequence:
                        # Nobody else has failed: a rank that the others wait for may hang.
                        self._write_stacks()
                        self._absent = absent_ranks(self._stacks_of_all(), [end.result for end in self._ends()])
                    self._stop()
                    return True
            if self._is_hung(now) or self._is_stranded():
                return True
            finished = finished or (now if self._all_finished() else None)
            if finished is not None and now > finished + TEARDOWN_S:
                self._end_teardown()
                return True
            self._wait(trap)

    def _wait(self, trap: SignalTrap) -> None:
        """Sleep until a process ends, a signal comes, or more can be shown; for a tick at most."""
        with selectors.DefaultSelector() as selector:
            descriptors = {p.fileno() for p in self._processes if p.pid not in self._codes} | {trap.fileno()}
            for descriptor in descriptors - {-1}:
                selector.register(descriptor, selectors.EVENT_READ)
            for descriptor in console.stalled() if self._unshown else ():
                selector.register(descriptor, selectors.EVENT_WRITE)
            selector.select(TICK_S)

    def _read(self) -> None:
        """Take in what the ranks wrote, and which processes have ended."""
        self._read_endings()
        for rank, tail in enumerate(self._tails):
            lines = tail.lines()
            if lines or self._has_printed(rank):
                self._heard[rank] = time.monotonic()
            for line in lines:
                self._take(rank, line)

    def _show(self, trap: SignalTrap) -> bool:
        """Show what is new, as far as the console takes it; True where that is all."""
        self._pour(trap)
        # A rank inside this process has printed to the console itself.
        if not self._unshown and self._observer is not None and self._plan.method != "inline":
            lines = self._output.lines(to_the_end=self._all_ended())
            self._unshown.extend(partial(self._observer.output, line) for line in lines)
            self._pour(trap)
        return not self._unshown

    def _pour(self, trap: SignalTrap) -> None:
        with trap.raising_in_output():
            while self._unshown and not console.stalled():
                self._unshown.popleft()()

    def _show_the_rest(self, trap: SignalTrap) -> None:
        """Show what the ranks left, for as long as its reader needs.

        Raises:
            Interrupted: A signal came first.
        """
        self._read()
        while not self._show(trap):
            trap.raise_if_caught()
            self._wait(trap)

    def _has_printed(self, rank: int) -> bool:
        """Return True where a rank has printed since the last look: of a task that records no steps, that is the heartbeat."""
        if self._plan.train is not None or self._plan.timeout_s is None:
            return False
        log = self._run.log(rank)
        before, self._printed[rank] = self._printed[rank], log.stat().st_size if log.exists() else 0
        return self._printed[rank] != before

    def _read_endings(self) -> None:
        for process in self._processes:
            if process.pid not in self._codes and (code := process.poll()) is not None:
                self._codes[process.pid] = code
                if process.rank is not None:
                    self._endings[process.rank] = Ending(code, time.monotonic(), process.server)
        if self._has_agent and (self._decides or self._all_ended()):
            self._read_workers()

    def _read_workers(self) -> None:
        """Take in the ends of an agent's ranks; one whose worker is gone as well has failed."""
        is_over = self._all_ended()
        for rank in set(range(self._plan.nprocs)) - set(self._endings):
            path = self._run.ending(rank)
            if path.exists():
                self._endings[rank] = Ending(**json.loads(path.read_text()))
            elif is_over and rank not in self._finished:
                self._endings[rank] = Ending(1, time.monotonic())

    @property
    def _has_agent(self) -> bool:
        return any(process.rank is None for process in self._processes)

    @property
    def _decides(self) -> bool:
        """True where the first failure ends the run; False where torch's agent may start the ranks again."""
        return self._plan.max_restarts == 0

    def _take(self, rank: int, line: str) -> None:
        event = json.loads(line)
        if event["event"] == "start":
            self._pids[rank] = event["pid"]
            for ranks in (self._finished, self._left, self._joining, self._joined):
                ranks.discard(rank)
        if event["event"] in ("joining", "joined"):
            (self._joining if event["event"] == "joining" else self._joined).add(rank)
        if event["event"] == "end":
            self._finished.add(rank)
            if event["status"] != "raised":
                self._left.add(rank)
        if self._observer is not None:
            self._unshown.append(partial(self._observer.event, rank, event))

    def _ends(self) -> list[End]:
        return [self._end_of(rank) for rank in range(self._plan.nprocs)]

    def _end_of(self, rank: int) -> End:
        result = RankResult.from_events(rank, self._run.events(rank))
        ending = self._endings.get(rank)
        if ending is None:
            return End(result, None, stopped=rank in self._stopped)
        stopped = rank in self._stopped or self._was_stopped_by_agent(ending)
        return End(result, ending.code, ending.t, stopped, ending.server)

    def _was_stopped_by_agent(self, ending: Ending) -> bool:
        """Return True where the agent had a rank to stop the others for, before the supervisor had heard of it."""
        if not self._has_agent or ending.code != -signal.SIGTERM:
            return False
        return any(other.code != 0 and other.t < ending.t for other in self._endings.values())

    def _all_ended(self) -> bool:
        return all(process.pid in self._codes for process in self._processes)

    def _all_finished(self) -> bool:
        return len(self._finished) == self._plan.nprocs

    def _is_hung(self, now: float) -> bool:
        limit = self._plan.timeout_s
        silent = [rank for rank, heard in enumerate(self._heard) if rank not in self._finished]
        if limit is None or not silent or any(now - self._heard[rank] <= limit for rank in silent):
            return False
        self._marks["hung"] = now
        self._write_stacks()
        self._stop()
        return True

    def _is_stranded(self) -> bool:
        """Return True, all ranks being stopped, where some wait for a group that one has left without joining it."""
        gone = sorted(self._left - self._joined)
        waiting = sorted(self._joining - self._joined - self._finished)
        if not gone or not waiting or not self._decides:
            return False
        self._stranding, self._waiting = gone[0], waiting
        self._stop()
        return True

    def _write_stacks(self) -> None:
        """Have every rank write where it stands, and join that in one file."""
        asked = [rank for rank in self._pids if rank not in self._finished and rank not in self._endings]
        for rank in asked:
            _signal_one(self._pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_S
        sizes: list[int] = []
        while time.monotonic() < deadline and not is_pressed():
            before, sizes = sizes, [len(self._stack(rank)) for rank in asked]
            if 0 not in sizes and sizes == before:
                break
            time.sleep(0.05)
        texts = [f"--- rank {rank} ---\n{text}" for rank, text in enumerate(self._stacks_of_all())]
        self._run.stacks.write_text("\n".join(texts))

    def _stacks_of_all(self) -> list[str]:
        return [self._stack(rank) for rank in range(self._plan.nprocs)]

    def _stack(self, rank: int) -> str:
        path = self._run.rank_stacks(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _stop(self) -> None:
        """End every process that runs: SIGTERM, then SIGKILL after the grace time, which a signal to this process ends."""
        running = [process for process in self._processes if process.pid not in self._codes]
        if not running:
            return
        self._stopped |= set(range(self._plan.nprocs)) - self._finished - set(self._endings)
        for process in running:
            kill_group(process.pid, signal.SIGTERM)
        if not self._await(self._plan.grace_s, until=is_pressed):
            self._note_stubborn()
            for process in running:
                if process.pid not in self._codes:
                    kill_group(process.pid, signal.SIGKILL)
            self._await(5.0)

    def _note_stubborn(self) -> None:
        ranks = sorted(rank for rank in self._pids if rank not in self._endings)
        if ranks:
            self.notes.append(
                f"{listed(ranks)} ignored SIGTERM for {self._plan.grace_s:g} s{aside(self._plan.words, 'grace_s')}"
                " and ended by SIGKILL."
            )

    def _await(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        deadline = time.monotonic() + seconds
        while not self._all_ended() and time.monotonic() < deadline and not until():
            self._read_endings()
            time.sleep(0.005)
        return self._all_ended()

    def _end_teardown(self) -> None:
        """End ranks that are done and do not exit; their result stands."""
        late = [process for process in self._processes if process.pid not in self._codes]
        ranks = [process.rank for process in late if process.rank is not None]
        for process in late:
            kill_group(process.pid, signal.SIGKILL)
        self._await(5.0)
        who = listed(ranks) if ranks else "The agent"
        self.notes.append(f"{who} finished and did not exit within {TEARDOWN_S:g} s: a fault of teardown, not of the run.")

    def _judge(self) -> RunResult:
        logs = [self._log(rank) for rank in range(self._plan.nprocs)]
        result = judge(self._ends(), logs, self._marks)
        if "hung" in self._marks:
            result = self._judge_hang(result)
        elif self._absent:
            result = self._judge_absence(result)
        elif self._stranding is not None:
            said = f"rank {self._stranding} of {self._plan.nprocs} ended without joining the group."
            waited = f"{listed(self._waiting)} waited for it."
            result = _failed(result, f"{said} {waited}", self._stranding, f"Log: {self._log(self._stranding)}")
        if result.status == "ok" and any(process.rank is None and self._codes[process.pid] for process in self._processes):
            result = _failed_agent(result, self._run)
        if self.notes:
            result = dataclasses.replace(result, message=" ".join([result.message, *self.notes]).strip())
        return result

    def _log(self, rank: int) -> str:
        """Return where to look for what a rank said; an interpreter that did not come up says it elsewhere."""
        own = self._run.log(rank)
        return _shown(own if own.exists() or not self._run.launcher_log.exists() else self._run.launcher_log)

    def _judge_absence(self, result: RunResult) -> RunResult:
        """Return ``result`` with the ranks named that did not arrive where the others waited until that failed."""
        message = f"{listed(self._absent)} of {self._plan.nprocs} did not arrive where the others waited. {result.message}"
        see = f"{result.see} Stacks of all ranks: {_shown(self._run.stacks)}".strip()
        return dataclasses.replace(result, message=message, see=see, failed_rank=self._absent[0])

    def _judge_hang(self, result: RunResult) -> RunResult:
        absent = absent_ranks(self._stacks_of_all(), result.ranks)
        rank = absent[0] if absent else min(result.ranks, key=lambda r: len(r.steps)).rank
        total = self._plan.train.steps if self._plan.train else None
        limit = f"{self._plan.timeout_s:g} s{aside(self._plan.words, 'timeout_s')}"
        if result.ranks[rank].pid is None:
            message = f"rank {rank} of {self._plan.nprocs} did not start within {limit}."
            return _failed(result, message, rank, f"Log: {self._log(rank)}")
        steps = result.ranks[rank].steps
        after = f" after step {steps[-1].step + 1}" + (f" of {total}" if total else "") if steps else ""
        others = f" {listed(absent)} did not arrive where the others waited." if 0 < len(absent) < len(result.ranks) else ""
        message = f"rank {rank} of {self._plan.nprocs} was silent for {limit}{after}; all ranks were stopped.{others}"
        return _failed(result, message, rank, f"Stacks of all ranks: {_shown(self._run.stacks)}")


def _failed(result: RunResult, message: str, rank: int, see: str) -> RunResult:
    return dataclasses.replace(
        result, status="failed", message=message, see=see, failed_rank=rank, exit_code=1, signal=None, consequences=()
    )


def _signal_one(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _shown(path: Path) -> str:
    """Return a path as short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _failed_agent(result: RunResult, run: RunDir) -> RunResult:
    message = "torch's agent failed although its ranks finished."
    return dataclasses.replace(result, status="failed", message=message, see=f"Log: {_shown(run.launcher_log)}", exit_code=1)

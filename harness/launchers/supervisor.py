"""One supervisor for every launcher: it watches the ranks of a run, stops them, and collects what they recorded."""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections.abc import Callable, Sequence

from harness.errors import HarnessError, aside
from harness.launchers import console, failure
from harness.launchers.base import Process
from harness.launchers.display import Display, Observer
from harness.launchers.ranks import Ranks
from harness.launchers.signals import Interrupted, SignalTrap
from harness.launchers.stacks import absent_ranks
from harness.launchers.tail import Tail
from harness.launchers.temp_dir import TempDir
from harness.run.environment import require_loopback
from harness.run.folder import RunDir
from harness.run.launch_methods import traits_of
from harness.run.outcome import first_to_fall, judge, listed
from harness.run.plan import RunPlan
from harness.run.record import RunResult

TICK_S = 0.1
"""How often records are read while nothing ends: each time costs the ranks a moment of their cores."""
SETTLE_S = 0.5
"""How long a failure that may be a consequence waits for its cause to be heard."""
TEARDOWN_S = 10.0
"""How long a rank that has recorded its end may take to exit."""


class Supervisor:
    """Watches one run. What it holds is read again from the run's folder whenever it is asked."""

    def __init__(self, run: RunDir, plan: RunPlan, observer: Observer | None, called: float) -> None:
        self._run = run
        self._plan = plan
        self._marks = {"called": called}
        self._ranks = Ranks(run, plan)
        # What rank 0 prints stands for the run; the others' output stays in their logs.
        self._display = Display(observer, None if traits_of(plan.method).shows_own_output else Tail(run.log(0)))
        self._temp_dir: TempDir | None = None
        self._settle: float | None = None
        self._absent: Sequence[int] = ()
        self._stranding: failure.Stranding | None = None
        self._was_torn_down = False
        self.notes: list[str] = []

    def watch(self, start: Callable[[], Sequence[Process]], timeout: float | None = None) -> RunResult | None:
        """Start the ranks, see them to their end, and return what came out; None if ``timeout`` seconds pass before.

        Raises:
            HarnessError: The ranks cannot be started.
            Interrupted: SIGINT, SIGTERM or SIGHUP came; all ranks are gone.
        """
        with SignalTrap() as trap:
            try:
                # Else this is another look, after a timeout: the ranks run already.
                if not self._ranks.processes:
                    self._start(start)
                is_over = self._until_end(trap, timeout)
                if is_over:
                    self._show_the_rest(trap)
                trap.raise_if_caught()
            except BaseException as error:
                self.stop()
                if isinstance(error, Interrupted):
                    # Python flushes its streams at the end, and would wait there, in spite of the signal.
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
        ranks = tuple(end.result for end in self._ranks.ends())
        return RunResult("failed", ranks, message, exit_code=1, marks=self._marks)

    def _start(self, start: Callable[[], Sequence[Process]]) -> None:
        if self._plan.nprocs > 1 and self._plan.num_machines == 1:
            require_loopback()
        try:
            self._make_temp_dir()
            self._ranks.processes = start()
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
        finished: float | None = None
        self._settle = None
        while True:
            self._read()
            # Not later: while a reader lets this process wait, the ranks are not silent.
            now = time.monotonic()
            self._display.show(trap, not self._ranks.running)
            trap.raise_if_caught()
            if not self._ranks.running:
                return True
            if deadline is not None and now > deadline:
                return False
            # In this order: ranks that wait for one that has failed are silent too.
            if self._has_fallen(now) or self._is_hung(now) or self._is_stranded():
                self._stop()
                return True
            finished = finished or (now if self._ranks.have_finished else None)
            # Where there are other machines, the agent waits for their ranks.
            if finished is not None and now > finished + TEARDOWN_S and self._plan.num_machines == 1:
                self._end_teardown()
                return True
            self._wait(trap)

    def _read(self) -> None:
        for rank, event in self._ranks.read():
            self._display.take(rank, event)

    def _wait(self, trap: SignalTrap) -> None:
        """Sleep until a process ends, a signal comes, or more can be shown; for a tick at most."""
        with selectors.DefaultSelector() as selector:
            # A set: ranks of one server share its descriptor, which a selector takes only once.
            descriptors = {process.fileno() for process in self._ranks.running} | {trap.fileno()}
            for descriptor in descriptors - {-1}:
                selector.register(descriptor, selectors.EVENT_READ)
            for descriptor in console.stalled() if self._display.is_behind else ():
                selector.register(descriptor, selectors.EVENT_WRITE)
            selector.select(TICK_S)

    def _show_the_rest(self, trap: SignalTrap) -> None:
        """Show what the ranks left, for as long as its reader needs.

        Raises:
            Interrupted: A signal came first.
        """
        self._read()
        while not self._display.show(trap, not self._ranks.running):
            trap.raise_if_caught()
            self._wait(trap)

    def _has_fallen(self, now: float) -> bool:
        """Return True where a rank has failed, and what may be a consequence has waited long enough for its cause."""
        # What follows reads every rank's records: not at each tick, only once a rank has ended.
        if not self._ranks.decides or not any(state.ending or state.has_finished for state in self._ranks.states):
            return False
        ends = self._ranks.ends()
        fallen = first_to_fall(ends)
        if fallen is None or not fallen.is_consequence:
            return fallen is not None
        # The others hear of a rank's end by their connections, often before its last line is read here.
        self._settle = self._settle or now + SETTLE_S
        if now < self._settle:
            return False
        # Nobody else has failed: a rank that the others wait for may hang.
        self._absent = absent_ranks(self._ranks.write_stacks(), [end.result for end in self._ranks.ends()])
        return True

    def _is_hung(self, now: float) -> bool:
        if not failure.is_silent(self._ranks.states, self._plan.timeout_s, now):
            return False
        self._marks["hung"] = now
        self._ranks.write_stacks()
        return True

    def _is_stranded(self) -> bool:
        self._stranding = failure.find_stranding(self._ranks.states) if self._ranks.decides else None
        return self._stranding is not None

    def _stop(self) -> None:
        stubborn = self._ranks.stop(self._plan.grace_s)
        if stubborn:
            limit = f"{self._plan.grace_s:g} s{aside(self._plan.words, 'grace_s')}"
            self.notes.append(f"{listed(stubborn)} ignored SIGTERM for {limit} and ended by SIGKILL.")

    def _end_teardown(self) -> None:
        """End ranks that are done and do not exit; their result stands."""
        ranks = [process.rank for process in self._ranks.running if process.rank is not None]
        self._ranks.kill()
        self._was_torn_down = True
        who = listed(ranks) if ranks else "The agent"
        self.notes.append(f"{who} finished and did not exit within {TEARDOWN_S:g} s: a fault of teardown, not of the run.")

    def _judge(self) -> RunResult:
        logs = [failure.log_of(self._run, rank) for rank in range(self._plan.nprocs)]
        result = judge(self._ranks.ends(), logs, self._marks)
        if "hung" in self._marks:
            result = failure.judge_hang(result, self._run, self._plan, self._ranks.stacks())
        elif self._absent:
            result = failure.judge_absence(result, self._run, self._absent)
        elif self._stranding is not None:
            result = failure.judge_stranding(result, self._run, self._stranding)
        # An agent that was killed because it did not exit has not failed by itself.
        if result.status == "ok" and self._ranks.agent_failed and not self._was_torn_down:
            result = failure.judge_agent(result, self._run)
        if self.notes:
            result = dataclasses.replace(result, message=" ".join([result.message, *self.notes]).strip())
        return result

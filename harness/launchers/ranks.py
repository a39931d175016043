"""The ranks of a run: their processes, and what they leave in its folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.launchers.base import Process
from harness.launchers.rank_state import Ending, RankState
from harness.launchers.signals import is_pressed
from harness.launchers.tail import Tail
from harness.run.folder import RunDir, read_json
from harness.run.json_text import from_json_text
from harness.run.outcome import End
from harness.run.plan import RunPlan
from harness.run.record import RankResult

STACKS_S = 2.0
"""How long ranks may take to write their stacks."""


class Ranks:
    """What is known of all ranks of one run.

    Attributes:
        states: In rank order.
        processes: Of the ranks, or of the agent that starts them.
        codes: Exit codes of the processes that have ended.
    """

    def __init__(self, run: RunDir, plan: RunPlan) -> None:
        self._run = run
        self._plan = plan
        self.states = [RankState(rank, Tail(run.records(rank))) for rank in range(plan.nprocs)]
        self.processes: Sequence[Process] = ()
        self.codes: dict[Process, int] = {}

    @property
    def decides(self) -> bool:
        """True where the first failure ends the run; False where torch's agent may start the ranks again."""
        return self._plan.max_restarts == 0

    @property
    def running(self) -> list[Process]:
        """The processes that have not ended."""
        return [process for process in self.processes if process not in self.codes]

    @property
    def have_finished(self) -> bool:
        """True where every rank has recorded its end."""
        return all(state.has_finished for state in self.states)

    @property
    def agent_failed(self) -> bool:
        """True where an agent ended with an error of its own."""
        return any(process.rank is None and code != 0 for process, code in self.codes.items())

    @property
    def _has_agent(self) -> bool:
        return any(process.rank is None for process in self.processes)

    def read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Take in what the ranks wrote, and which processes have ended; yield each event and its rank."""
        # Before the records: of a process that was seen to have ended, the last line has been written.
        self.read_endings()
        for state in self.states:
            lines = state.records.lines()
            if lines or self._has_printed(state):
                state.heard = time.monotonic()
            for event in map(from_json_text, lines):
                state.take(event)
                yield state.rank, event

    def read_endings(self) -> None:
        """Take in which processes have ended."""
        for process in self.running:
            if (code := process.poll()) is not None:
                self.codes[process] = code
                if process.rank is not None:
                    self.states[process.rank].ending = Ending(code, time.monotonic(), process.server)
        # While the agent may start the ranks again, no ending is known to be the last.
        if self._has_agent and (self.decides or not self.running):
            self._read_workers()

    def _read_workers(self) -> None:
        """Take in the ends of an agent's ranks; one whose worker is gone as well has failed."""
        is_over = not self.running
        paths = {state.rank: self._run.ending(state.rank) for state in self.states if state.ending is None}
        endings = {rank: Ending(**read_json(path)) for rank, path in paths.items() if path.exists()}
        latest = max((ending.attempt for ending in endings.values()), default=0)
        for state in (state for state in self.states if state.ending is None):
            ending = endings.get(state.rank)
            if ending is not None and ending.attempt < latest:
                # The agent ended its worker before that had come up again: the ending of before is none of this start.
                state.ending = Ending(-signal.SIGTERM, time.monotonic(), attempt=latest, is_unheard=True)
            elif ending is not None:
                state.ending = ending
            elif is_over and not state.has_finished:
                # Killed with its worker, so that nobody was left to write down how.
                state.ending = Ending(1, time.monotonic())

    def _has_printed(self, state: RankState) -> bool:
        """Return True where a rank has printed since the last look: of a task that records no steps, that is the heartbeat."""
        # A training has its steps for a heartbeat, and one that prints for ever may still hang.
        if self._plan.train is not None or self._plan.timeout_s is None:
            return False
        log = self._run.log(state.rank)
        before, state.printed = state.printed, log.stat().st_size if log.exists() else 0
        return state.printed != before

    def ends(self) -> list[End]:
        """Return how each rank came to its end, or how far it has come."""
        return [self._end_of(state) for state in self.states]

    def _end_of(self, state: RankState) -> End:
        # Read again, whole: what is judged is what anybody can read in the folder, and judge once more.
        ending = state.ending
        is_unheard = ending is not None and ending.is_unheard
        result = RankResult.from_events(state.rank, [] if is_unheard else self._run.events(state.rank))
        num_steps = (self._plan.train.steps or 0) if self._plan.train else None
        if ending is None:
            return End(result, None, stopped=state.is_stopped, num_steps=num_steps)
        stopped = state.is_stopped or self._was_stopped_by_agent(ending)
        return End(result, ending.code, ending.t, stopped, ending.server, num_steps)

    def _was_stopped_by_agent(self, ending: Ending) -> bool:
        """Return True where the agent had a rank to stop the others for, before the supervisor had heard of it."""
        if not self._has_agent or ending.code != -signal.SIGTERM:
            return False
        return any(state.ending.code != 0 and state.ending.t < ending.t for state in self.states if state.ending is not None)

    def stop(self, grace_s: float) -> list[int]:
        """End every process that runs: SIGTERM, then SIGKILL after the grace time, which a signal to this process ends.

        Returns:
            The ranks that it took SIGKILL for.
        """
        if not self.running:
            return []
        for state in self.states:
            # Noted before a signal is sent: how these end from now on is a consequence.
            state.is_stopped = state.is_stopped or not (state.has_finished or state.ending)
        for process in self.running:
            process.signal(signal.SIGTERM)
        if self._await(grace_s, until=is_pressed):
            return []
        # A rank without a number never ran code of ours, and has ignored nothing.
        stubborn = [state.rank for state in self.states if state.pid is not None and state.ending is None]
        self.kill()
        return stubborn

    def kill(self) -> None:
        """End every process that runs, at once."""
        for process in self.running:
            process.kill()
        # With an end: a process that sleeps in a driver, uninterruptibly, outlasts even SIGKILL.
        self._await(5.0)

    def _await(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline and not until():
            self.read_endings()
            time.sleep(0.005)
        return not self.running

    def write_stacks(self) -> list[str]:
        """Have every rank write where it stands, join that in one file, and return it for each rank."""
        asked = [state for state in self.states if state.is_running]
        for state in asked:
            for process in self.running:
                # Of an agent's ranks only the numbers are known that they recorded: they are no children of this process.
                if state.pid is not None and process.rank in (state.rank, None):
                    process.ask_for_stacks(state.pid)
        deadline = time.monotonic() + STACKS_S
        # faulthandler says nowhere that it is done: a file that has stopped to grow is taken for whole.
        sizes: list[int] = []
        while time.monotonic() < deadline and not is_pressed():
            before, sizes = sizes, [len(self._stack(state)) for state in asked]
            if 0 not in sizes and sizes == before:
                break
            time.sleep(0.05)
        stacks = self.stacks()
        self._run.stacks.write_text("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(stacks)))
        return stacks

    def stacks(self) -> list[str]:
        """Return what each rank has written of where it stands; it may come late."""
        return [self._stack(state) for state in self.states]

    def _stack(self, state: RankState) -> str:
        path = self._run.rank_stacks(state.rank)
        return path.read_text(errors="replace") if path.exists() else ""

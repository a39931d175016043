"""Who fell first: from what the ranks recorded and how their processes ended to one sentence. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from harness.run.record import Failure, RankResult, RunResult


@dataclass(frozen=True)
class End:
    """How one rank came to its end.

    Attributes:
        result: What it recorded.
        returncode: Of its process, negative for a signal; None where it runs, or where nobody saw it.
        ended: CLOCK_MONOTONIC when its process was seen to have ended, in seconds; None while it runs.
        stopped: True where it was ended because another had failed.
        server: Exit code of the process that it was forked from, whose death ended it; None where it ended otherwise.
        num_steps: Steps that its plan promises, so that status 0 is a success only at their end; 0 where the data alone tell
            how many; None where it promises none.
    """

    result: RankResult
    returncode: int | None
    ended: float | None = None
    stopped: bool = False
    server: int | None = None
    num_steps: int | None = None

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.result.rank

    @property
    def has_failed(self) -> bool:
        """True for a rank that failed by itself."""
        if self.result.status == "raised" or self.result.code != 0:
            return True
        # Even sys.exit(0): a plan that promises steps is not done before the last of them.
        if self.num_steps is not None and self.result.status == "exit":
            return True
        return not self.stopped and self.result.status == "unfinished" and self.returncode is not None

    @property
    def t(self) -> float:
        """When it failed: as it recorded itself, else when its process was seen to have ended."""
        raised = self.result.failure.t if self.result.failure is not None else None
        # A process is seen to have ended some time after it has; what it recorded itself is nearer.
        return min((t for t in (raised, self.result.t_end, self.ended) if t is not None), default=0.0)

    @property
    def is_consequence(self) -> bool:
        """True where the failure may come from another rank's end."""
        return self.result.failure is not None and self.result.failure.collective

    @property
    def left_early(self) -> bool:
        """True for a rank that left without an error, so that others may have waited for it in vain."""
        result = self.result
        if result.status == "exit" and self.num_steps is not None:
            # Whatever its process came to: the others may have been stopped for it before it was gone.
            return result.code == 0
        if result.code != 0 or self.returncode not in (None, 0):
            return False
        return "finished" in result.marks or result.status == "exit" or (result.status == "unfinished" and self.returncode == 0)


def first_to_fall(ends: Sequence[End]) -> End | None:
    """Return the rank that brought the run down: of those that failed by themselves the earliest, and only then the others."""
    failed = [end for end in ends if end.has_failed]
    if not failed:
        return None
    # A consequence may be recorded before its cause, and by its own rank's clock be the earlier one.
    causes = [end for end in failed if not end.is_consequence and not end.left_early]
    early = [end for end in ends if end.left_early]
    # One that vanished comes before those that have returned from their task.
    vanished = [end for end in early if end.result.status == "unfinished" and "finished" not in end.result.marks]
    return min(causes or vanished or early or failed, key=lambda end: end.t)


def judge(ends: Sequence[End], logs: Sequence[str], marks: dict[str, float]) -> RunResult:
    """Return the run's result.

    Args:
        ends: In rank order.
        logs: Path of each rank's log, as it is to be printed.
        marks: The parent's own marks.
    """
    ranks = tuple(end.result for end in ends)
    first = first_to_fall(ends)
    if first is None:
        return _judge_without_failure(ends, marks)
    others = [end for end in ends if end is not first]
    consequences = tuple(end.rank for end in others if end.has_failed and end.is_consequence)
    code = first.returncode
    # A rank that recorded its end and was then stopped is no victim of that signal.
    killed = code is not None and code < 0 and first.result.status == "unfinished"
    return RunResult(
        "failed",
        ranks,
        message=f"{describe(first, others)} {describe_others(first, others)}".rstrip(),
        failed_rank=first.rank,
        consequences=consequences,
        # Never 0: a rank that left early did so with that status, and the run has failed.
        exit_code=None if killed else first.result.code or (code if code is not None and code > 0 else 1),
        signal=-code if code is not None and killed else None,
        marks=marks,
        see=_where_to_look(first, logs),
    )


def _judge_without_failure(ends: Sequence[End], marks: dict[str, float]) -> RunResult:
    ranks = tuple(end.result for end in ends)
    unfinished = [end.rank for end in ends if end.result.status == "unfinished"]
    if not unfinished:
        return RunResult("ok", ranks, marks=marks)
    message = f"{listed(unfinished)} of {len(ends)} {'was' if len(unfinished) == 1 else 'were'} stopped before the end."
    return RunResult("failed", ranks, message=message, failed_rank=unfinished[0], exit_code=1, marks=marks)


def describe(end: End, others: Sequence[End]) -> str:
    """Return what became of the rank that fell first."""
    who = f"rank {end.rank} of {len(others) + 1}"
    result = end.result
    others_waited = any(other.stopped or other.is_consequence for other in others)
    if result.failure is not None:
        return _describe_failure(f"{who} failed{_at_step(result)}", result.failure)
    if end.left_early and "finished" in result.marks:
        return f"{who} finished{_at_step(result)} while others waited for it."
    if end.left_early:
        waited = " and while others waited for it" if others_waited else ""
        return f"{who} exited with status 0{_after_step(end)}, before its task was done{waited}."
    if result.status == "exit":
        return f"{who} called sys.exit({_shortened(result.value, result.code)}){_at_step(result)}."
    if end.server is not None:
        return _describe_death(f"the process that {who} was forked from", end.server, _at_step(result))
    return _describe_death(who, end.returncode, _at_step(result))


def _describe_death(who: str, code: int | None, at_step: str) -> str:
    if code is None or code >= 0:
        return f"{who} ended with exit code {code}{at_step}, without a word of why."
    hint = " The kernel does so when memory runs out." if code == -signal.SIGKILL else ""
    return f"{who} was killed by signal {-code} ({signal_name(-code)}){at_step}.{hint}"


def _shortened(value: object, code: int) -> str:
    """Return what a rank gave to ``sys.exit``; its status where that is not known."""
    text = repr(code if value is None else value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _describe_failure(who: str, failure: Failure) -> str:
    cause = f" Its first cause: {failure.cause}{'' if failure.cause.endswith('.') else '.'}" if failure.cause else ""
    if failure.mistake:
        return f"{failure.message}{cause}"
    where = f" ({failure.where})" if failure.where else ""
    stop = "" if failure.message.endswith(".") and not where else "."
    return f"{who}: {failure.type}: {failure.message}{where}{stop}{cause}"


def describe_others(first: End, others: Sequence[End]) -> str:
    """Return what became of the other ranks, a sentence for each kind of end, with a space after each."""
    # A server's death takes all of its ranks along, and a mistake is the same in each: a list adds nothing.
    if first.server is not None or (first.result.failure is not None and first.result.failure.mistake):
        return ""
    failed = [end for end in others if end.has_failed]
    alike = [end.rank for end in failed if not end.is_consequence and _is_same(end, first)]
    unlike = [end.rank for end in failed if not end.is_consequence and not _is_same(end, first)]
    consequences = [end.rank for end in failed if end.is_consequence]
    stopped = [end.rank for end in others if not end.has_failed and end.stopped]
    sentences = [
        (alike, "failed in the same way"),
        (unlike, "failed by themselves after it" if len(unlike) > 1 else "failed by itself after it"),
        (consequences, "failed as a consequence"),
        (stopped, "were stopped" if len(stopped) > 1 else "was stopped"),
    ]
    return "".join(f"{listed(ranks)} {what}. " for ranks, what in sentences if ranks)


def _is_same(end: End, first: End) -> bool:
    failure, first_failure = end.result.failure, first.result.failure
    if failure is None or first_failure is None:
        # Where one of them left no exception, the ends of the processes have to tell.
        return _how(end) == _how(first)
    return (failure.type, failure.message) == (first_failure.type, first_failure.message)


def _how(end: End) -> tuple[str, int, int | None]:
    return end.result.status, end.result.code, end.returncode if end.result.status == "unfinished" else None


def listed(ranks: Sequence[int]) -> str:
    """Return ``Ranks 0, 2 and 3``."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def signal_name(number: int) -> str:
    """Return a signal's name, or its number where it has none."""
    try:
        # Python names the first and the last of the real-time signals, and none between them.
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _at_step(result: RankResult) -> str:
    if not result.steps:
        return " at step 0" if "DDP built" in result.marks else ""
    # A step is recorded when it has ended, so the rank fell in the one after it.
    return f" at step {result.steps[-1].step + 1}"


def _after_step(end: End) -> str:
    """Return how far a rank had come with the steps that its plan promises, if it promises any."""
    if end.num_steps is None:
        return _at_step(end.result)
    # Where the data alone tell how many, the rank has recorded it.
    total = end.num_steps or end.result.facts.get("num_steps", 0)
    of_total = f" of {total}" if total else ""
    return f" after step {end.result.steps[-1].step + 1}{of_total}" if end.result.steps else f" before step 1{of_total}"


def _where_to_look(end: End, logs: Sequence[str]) -> str:
    failure = end.result.failure
    if failure is not None and failure.mistake:
        return ""
    what = "Traceback" if failure is not None and failure.where else "Log"
    return f"{what}: {logs[end.rank]}"

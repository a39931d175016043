"""Who fell first, and the sentence that says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.run.outcome import End, first_to_fall, judge, listed
from harness.run.record import Failure, RankResult, RunResult, Step

LOGS = [f"out/rank-{rank}.log" for rank in range(4)]


def failure(kind: str = "ValueError", message: str = "bad", collective: bool = False, t: float = 5.0) -> Failure:
    return Failure(kind, message, "mine.py:7", "Traceback ...", collective, t)


def raised(rank: int, t: float = 5.0, **named: Any) -> End:
    result = RankResult(rank, status="raised", code=1, failure=failure(t=t, **named), t_end=t + 0.1)
    return End(result, 1, t + 0.2)


def ok(rank: int) -> End:
    return End(RankResult(rank, status="ok", t_end=1.0, marks={"finished": 0.9}), 0, 1.1)


def died(rank: int, returncode: int, t: float = 5.0, **fields: Any) -> End:
    return End(RankResult(rank, **fields), returncode, t)


def stopped(rank: int) -> End:
    return End(RankResult(rank), -15, 9.0, stopped=True)


def running(rank: int) -> End:
    return End(RankResult(rank), None)


def said(*ends: End) -> RunResult:
    return judge(ends, LOGS, {})


def test_all_ok() -> None:
    assert first_to_fall([ok(0), ok(1)]) is None
    assert (said(ok(0), ok(1)).status, said(ok(0), ok(1)).message) == ("ok", "")


def test_rank_without_end_is_never_ok() -> None:
    result = said(ok(0), stopped(1))
    assert (result.status, result.failed_rank, result.exit_code) == ("failed", 1, 1)
    assert result.message == "Rank 1 of 2 was stopped before the end."


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (False, "rank 0 of 1 failed: ValueError: bad (mine.py:7). Its first cause: KeyError: 'x'."),
        (True, "bad Its first cause: KeyError: 'x'."),
    ],
)
def test_the_first_cause_is_told_too(mistake: bool, message: str) -> None:
    caused = replace(failure(), mistake=mistake, cause="KeyError: 'x'")
    assert said(End(RankResult(0, status="raised", code=1, failure=caused), 1)).message == message


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([raised(0, t=5.0), raised(1, t=4.0)], 1),
        # A consequence is heard first, and raised first by the clock of its own rank.
        ([raised(0, t=1.0, collective=True), raised(1, t=2.0)], 1),
        ([raised(0, t=1.0, collective=True), died(1, -9, t=2.0)], 1),
        ([raised(0, t=1.0, collective=True), died(1, 0, t=2.0)], 1),
        # Only consequences: the earliest of them.
        ([raised(0, t=3.0, collective=True), raised(1, t=2.0, collective=True)], 1),
        # A rank that another's end has made abort is no cause.
        ([died(0, -6, t=5.0), raised(1, t=4.0)], 1),
        ([died(0, -9, t=3.0), raised(1, t=4.0)], 0),
        ([stopped(0), died(1, 7)], 1),
        ([raised(0, collective=True), ok(1)], 1),
    ],
)
def test_first_to_fall(ends: list[End], rank: int) -> None:
    first = first_to_fall(ends)
    assert first is not None and first.rank == rank


def test_running_ranks_have_not_failed() -> None:
    assert first_to_fall([running(0), running(1)]) is None
    early = first_to_fall([running(0), died(1, 0)])
    assert early is not None and early.left_early


def test_a_rank_that_vanished_is_blamed_before_one_that_returned() -> None:
    first = first_to_fall([running(0), died(1, 0, t=5.0), ok(2)])
    assert first is not None and first.rank == 1


@pytest.mark.parametrize(
    ("end", "sentence", "code", "number"),
    [
        (raised(1), "rank 1 of 2 failed: ValueError: bad (mine.py:7).", 1, None),
        (died(1, 7), "rank 1 of 2 ended with exit code 7, without a word of why.", 7, None),
        (died(1, -9), "rank 1 of 2 was killed by signal 9 (SIGKILL). The kernel does so when memory runs out. ", None, 9),
        (died(1, -11), "rank 1 of 2 was killed by signal 11 (SIGSEGV). Rank 0 was", None, 11),
        (died(1, -64), "rank 1 of 2 was killed by signal 64 (", None, 64),
        (died(1, 0), "rank 1 of 2 exited with status 0, before its task was done and while others waited for it.", 1, None),
        (died(1, 3, status="exit", code=3), "rank 1 of 2 called sys.exit(3).", 3, None),
        (died(1, 1, status="exit", code=1, value=256), "rank 1 of 2 called sys.exit(256).", 1, None),
        (died(1, 44, status="exit", code=44, value=300), "rank 1 of 2 called sys.exit(300).", 44, None),
        (died(1, 1, status="exit", code=1, value="no such file"), "rank 1 of 2 called sys.exit('no such file').", 1, None),
    ],
)
def test_sentences(end: End, sentence: str, code: int | None, number: int | None) -> None:
    result = said(stopped(0), end)
    assert result.account.startswith(sentence) and "Rank 0 was stopped. " in result.account
    assert (result.failed_rank, result.exit_code, result.signal) == (1, code, number)
    assert result.account.endswith("out/rank-1.log")


STEPS = (Step(46, 1.0, 1.0, 0.1, 0.1, 1.0),)


@pytest.mark.parametrize(
    ("promised", "status", "steps", "how_far"),
    [
        (100, "exit", STEPS, " after step 47 of 100"),
        (100, "unfinished", STEPS, " after step 47 of 100"),
        (100, "exit", (), " before step 1 of 100"),
        # Epochs, of which the data tell the number of steps.
        (0, "exit", STEPS, " after step 47 of 60"),
        (0, "exit", (), " before step 1 of 60"),
    ],
)
@pytest.mark.parametrize("nprocs", [1, 2])
def test_status_0_before_the_promised_steps_is_a_failure(
    promised: int, status: str, steps: tuple[Step, ...], how_far: str, nprocs: int
) -> None:
    ranks = [RankResult(rank, status=status, steps=steps, facts={"num_steps": 60}, t_end=5.0) for rank in range(nprocs)]
    ends = [End(rank, 0, 5.0, num_steps=promised) for rank in ranks]
    if status == "exit":
        # Its process may have been stopped once its end was read.
        ends[-1] = replace(ends[-1], returncode=-15, stopped=True)
    result = said(*ends)
    assert (result.status, result.failed_rank, result.exit_code) == ("failed", 0, 1)
    assert result.message.startswith(f"rank 0 of {nprocs} exited with status 0{how_far}, before its task was done")
    assert ("Rank 1 failed in the same way." in result.message) == (nprocs == 2)


def test_status_0_is_a_success_where_no_steps_are_promised() -> None:
    assert said(died(0, 0, status="exit")).status == "ok"


def test_ranks_that_went_with_the_process_they_were_forked_from() -> None:
    ends = [End(RankResult(rank), -9, 5.0, server=1) for rank in (0, 1)]
    sentence = "the process that rank 0 of 2 was forked from ended with exit code 1, without a word of why."
    assert said(*ends).account == f"{sentence} Log: out/rank-0.log"


def test_step_is_named() -> None:
    steps = (Step(0, 1.0, 1.0, 0.1, 0.1, 1.0), Step(36, 1.0, 1.0, 0.1, 0.1, 1.0))
    assert "at step 37" in said(stopped(0), died(1, -9, steps=steps)).message


def test_what_became_of_the_others() -> None:
    ends = [raised(0, t=1), raised(1, t=2), raised(2, t=3, message="other"), raised(3, t=4, collective=True)]
    message = said(*ends).account
    assert "Rank 1 failed in the same way. Rank 2 failed by itself after it. Rank 3 failed as a consequence. " in message
    assert said(*ends).consequences == (3,)


def test_listed() -> None:
    assert [listed([0]), listed([0, 2]), listed([0, 2, 3])] == ["Rank 0", "Ranks 0 and 2", "Ranks 0, 2 and 3"]

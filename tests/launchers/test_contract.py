"""What every launcher promises: the same ends, the same messages, the same environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.entrypoints.run_job import run_job
from harness.errors import RankFailed
from harness.launchers import registry
from harness.launchers.local import OwnProcess, idle_threads
from harness.launchers.spawn import SpawnLauncher
from harness.launchers.temp_dir import TempDir
from harness.rank.process import conclude
from harness.run.environment import RankEnvironment
from harness.run.folder import RunDir
from harness.run.record import RunResult
from harness.run.recorder import Recorder
from tests import calls
from tests.launchers.starting import ECHO, STARTS, Echo, echo_plan
from tests.processes import alive, printing_into, scaled, wait_until

pytestmark = pytest.mark.ranks

ANY = [*STARTS, "inline"]


def line_of(text: str) -> int:
    """Return the number of the line of echo.py that is ``text``."""
    return next(n for n, line in enumerate(ECHO.read_text().splitlines(), 1) if line.strip() == text)


@pytest.mark.parametrize("how", ANY)
def test_finishes(how: str, echo: Echo) -> None:
    echoed = echo(how, {"*": "lines"})
    assert (echoed.result.status, echoed.result.message) == ("ok", "")
    assert [rank.status for rank in echoed.result.ranks] == ["ok"] * len(echoed.result.ranks)
    assert not [path.name for path in echoed.run.path.iterdir() if path.name.startswith(".") or path.name == "launcher.log"]


@pytest.mark.parametrize("how", ANY)
def test_exception_names_rank_type_message_and_users_line(how: str, echo: Echo) -> None:
    last = 0 if how == "inline" else 1
    result = echo(how, {str(last): "raise", "0": "for ever"} | ({"0": "raise"} if how == "inline" else {})).result
    assert result.status == "failed" and result.failed_rank == last
    line = line_of('raise ValueError("bad batch")')
    ranks = 1 if how == "inline" else 2
    assert re.search(rf"^rank {last} of {ranks} failed: ValueError: bad batch \(.*echo\.py:{line}\)\.", result.message)
    assert result.account.endswith(f"rank-{last}.log")
    if how != "inline":
        assert "Rank 0 was stopped." in result.message
        assert result.ranks[0].status == "unfinished"


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("unpicklable", "Unpicklable: cannot be pickled"),
        ("unprintable", "Unprintable: (its text cannot be had: RuntimeError)"),
        ("base", "Stop: stop it"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("how", ["spawn", "inline"])
def test_any_exception_is_a_failure(how: str, behaviour: str, expected: str, echo: Echo) -> None:
    result = echo(how, {"*": behaviour}, nprocs=1).result
    assert result.status == "failed" and expected in result.message
    assert result.exit_code == 1 and result.signal is None


@pytest.mark.parametrize(
    ("behaviour", "code", "number", "words"),
    [
        ("sys.exit(3)", 3, None, "called sys.exit(3)"),
        ("os._exit(7)", 7, None, "ended with exit code 7"),
        ("kill -9", None, 9, "was killed by signal 9 (SIGKILL)"),
        ("segfault", None, 11, "was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_exit_codes_and_signals(how: str, behaviour: str, code: int, number: int, words: str, echo: Echo) -> None:
    result = echo(how, {"1": behaviour, "0": "for ever"}).result
    assert result.message.startswith(f"rank 1 of 2 {words}")
    assert (result.failed_rank, result.exit_code, result.signal) == (1, code, number)


@pytest.mark.parametrize("how", ["spawn-spawn", "spawn-fork", "torchrun"])
def test_exit_codes_and_signals_however_ranks_start(how: str, echo: Echo) -> None:
    left = echo(how, {"1": "os._exit(7)", "0": "for ever"}).result
    killed = echo(how, {"1": "kill -9", "0": "for ever"}).result
    assert [(result.failed_rank, result.exit_code, result.signal) for result in (left, killed)] == [(1, 7, None), (1, None, 9)]


@pytest.mark.parametrize("behaviour", ["sys.exit(256)", "sys.exit(text)"])
def test_no_exit_code_passes_for_success(behaviour: str, echo: Echo) -> None:
    result = echo("spawn", {"*": behaviour}, nprocs=1).result
    assert (result.status, result.exit_code) == ("failed", 1)


def test_early_exit_with_status_0_is_a_failure(how: str, echo: Echo) -> None:
    result = echo(how, {"0": "for ever", "1": "exit 0 when 0 waits"}).result
    assert result.status == "failed" and result.failed_rank == 1
    assert result.message.startswith("rank 1 of 2 exited with status 0, before its task was done and while others waited")


def test_a_rank_that_vanished_is_blamed_and_not_one_that_had_returned(how: str, echo: Echo) -> None:
    result = echo(how, {"0": "for ever", "1": "exit 0 after 2", "2": "nothing"}, nprocs=3).result
    assert result.failed_rank == 1
    assert result.message.startswith("rank 1 of 3 exited with status 0, before its task was done and while others waited")


def test_signal_that_comes_at_once_ends_a_forked_rank(tmp_path: Path) -> None:
    context = harness.spawn(calls.wait_for, (str(tmp_path / "never"),), 2, start_method="fork", join=False)
    os.kill(context.processes[0].pid, signal.SIGTERM)
    with pytest.raises(RankFailed) as caught:
        context.join()
    assert (caught.value.rank, caught.value.signal) == (0, signal.SIGTERM)


def test_ranks_are_forked_where_only_threads_of_ours_are_idle(echo: Echo) -> None:
    statuses: list[str] = []
    thread = threading.Thread(target=lambda: statuses.append(echo("launch", {"*": "nothing"}).result.status))
    thread.start()
    thread.join()
    assert idle_threads() == 1 and statuses == ["ok"]
    assert echo("spawn-fork", {"*": "nothing"}).result.message == ""


@pytest.mark.parametrize("how", ["spawn", "torchrun"])
@pytest.mark.parametrize(
    ("behaviour", "words"),
    [("left in barrier", "exited with status 0"), ("returns before barrier", "finished while others waited for it")],
)
def test_rank_that_leaves_others_in_a_barrier_is_named(how: str, behaviour: str, words: str, echo: Echo) -> None:
    result = echo(how, {"*": behaviour}).result
    assert result.status == "failed" and result.failed_rank == 1
    assert result.message.startswith(f"rank 1 of 2 {words}")
    # Rank 0 hears of it, or is stopped before it does: both happen, and each is told as it was.
    assert "Rank 0 failed as a consequence." in result.message or "Rank 0 was stopped." in result.message


def test_consequence_heard_first_is_marked_as_one(how: str, echo: Echo) -> None:
    result = echo(how, {"0": "consequence", "1": "raise after 0"}).result
    assert result.failed_rank == 1 and result.consequences == (0,)
    assert result.message.startswith("rank 1 of 2 failed: ValueError: bad batch")
    assert "Rank 0 failed as a consequence." in result.message


def test_hang_is_found_with_stacks_of_all(any_how: str, echo: Echo) -> None:
    timeout_s = scaled(8 if any_how == "torchrun" else 2.5)
    echoed = echo(any_how, {"0": "for ever"}, timeout_s=timeout_s)
    assert echoed.result.failed_rank == 0
    assert f"rank 0 of 2 was silent for {timeout_s:g} s (launcher.timeout_s); all ranks were stopped." in echoed.result.message
    assert str(echoed.run.stacks) in echoed.result.account
    assert "in for_ever" in echoed.run.stacks.read_text()


def test_rank_that_does_not_start_in_time_is_named(echo: Echo) -> None:
    result = echo("torchrun", {"*": "nothing"}, timeout_s=0.1).result
    assert result.account.startswith("rank 0 of 2 did not start within 0.1 s (launcher.timeout_s). Log: ")


def test_rank_that_a_collective_waits_for_in_vain_is_named(echo: Echo) -> None:
    echoed = echo("spawn", {"*": "timed barrier"}, settings={"BARRIER_S": str(scaled(3))})
    assert echoed.result.failed_rank == 1
    assert echoed.result.message.startswith("Rank 1 of 2 did not arrive where the others waited. rank 0 of 2 failed")
    assert "in for_ever" in echoed.run.stacks.read_text()


def stopping_s(result: RunResult, failed: int) -> float:
    """Return how long it took from the end of the rank that failed until all others were gone, in seconds."""
    assert result.failed_rank == failed
    return result.marks["returned"] - (result.ranks[failed].t_end or 0.0)


def test_deaf_rank_is_killed_after_the_grace_time(any_how: str, echo: Echo) -> None:
    result = echo(any_how, {"0": "deaf", "1": "raise when 0 is ready"}, grace_s=0.5).result
    assert 0.5 < stopping_s(result, 1) < 0.5 + scaled(2)
    assert "ValueError: bad batch" in result.message
    assert result.message.endswith("Rank 0 ignored SIGTERM for 0.5 s (launcher.grace_s) and ended by SIGKILL.")


def test_others_are_stopped_within_two_seconds(how: str, echo: Echo) -> None:
    assert stopping_s(echo(how, {"0": "for ever", "1": "raise when 0 waits"}).result, 1) < scaled(2)


def test_output_of_a_rank_that_dies_is_kept_in_whole_lines(how: str, echo: Echo) -> None:
    echoed = echo(how, {"0": "lines and exit when 1 waits", "1": "lines and wait"})
    assert echoed.result.exit_code == 1
    expected = [f"rank 0 line {number}" for number in range(1000)]
    assert echoed.heard.output_lines == expected
    assert echoed.run.log(1).read_text().splitlines() == [line.replace("rank 0", "rank 1") for line in expected]


def test_rank_ends_as_a_python_program_does(how: str, echo: Echo) -> None:
    echoed = echo(how, {"*": "leave"}, nprocs=1)
    assert echoed.result.status == "ok"
    assert (echoed.run.path / "atexit-0").exists() and (echoed.run.path / "thread-0").exists()
    assert echoed.heard.output_lines == ["no end of line"]


def test_progress_bar_stays_one_line(echo: Echo) -> None:
    assert echo("spawn", {"*": "progress"}, nprocs=1).heard.output_lines == ["10 %\r20 %\r30 %"]


def test_what_a_rank_started_itself_ends_with_it(how: str, echo: Echo) -> None:
    echoed = echo(how, {"*": "child process"}, nprocs=1)
    assert echoed.result.status == "ok"
    pid = int((echoed.run.path / "child-0").read_text())
    assert wait_until(lambda: not alive(pid), scaled(5))


def test_killed_rank_leaves_no_data_loader_workers(any_how: str, echo: Echo) -> None:
    # DataLoader itself would look for its parent only every 5 s.
    echoed = echo(any_how, {"0": "workers", "1": "workers, then kill -9"})
    assert (echoed.result.failed_rank, echoed.result.signal) == (1, 9), echoed.result.message
    assert all((echoed.run.path / f"iterating-{rank}").exists() for rank in (0, 1))
    assert wait_until(lambda: not printing_into(echoed.run.path), scaled(2)), printing_into(echoed.run.path)


def test_ranks_are_not_silent_while_what_they_said_is_being_shown(echo: Echo) -> None:
    timeout_s = scaled(2.5)

    class Slow:
        shown = 0

        def event(self, rank: int, event: object) -> None: ...

        def output(self, line: str) -> None:
            time.sleep(1.2 * timeout_s if not self.shown else 0.0)
            self.shown += 1

    folder, slow = RunDir(echo("spawn", {"*": "nothing"}).run.path.with_name("talked")), Slow()
    assert run_job(echo_plan("spawn", {"*": "talk"}, timeout_s=timeout_s), folder, slow).status == "ok"
    assert slow.shown == 81


def test_full_disk_leaves_word_of_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_a_part(path: Path, content: bytes) -> None:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    run = RunDir(tmp_path)
    echo_plan("spawn", {}).write(run)
    monkeypatch.setattr(Path, "write_bytes", write_a_part)
    for work, said in [(lambda: 5, "what the task returned (5 bytes) cannot be written: No space left"), (throw, "bad batch")]:
        with Recorder(run.records(0)) as record:
            assert conclude(work, run, RankEnvironment(), record) == 1
        assert said in run.events(0)[-1]["failure"]["message"]
    assert not list(tmp_path.glob(".*.aside"))


def throw() -> None:
    raise ValueError("bad batch")


def test_server_ends_by_itself_where_a_copy_holds_its_socket() -> None:
    launcher = SpawnLauncher()
    server = launcher.warm()
    server.probe()
    copy = os.dup(server.fileno())
    launcher.close()
    os.close(copy)
    assert server._child.returncode == 0


def test_temp_dir_needs_no_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    temp_dir = TempDir()
    temp_dir.close()
    assert not temp_dir.path.exists()


def test_dead_server_fails_its_run_and_is_replaced(echo: Echo) -> None:
    class Killer:
        def event(self, rank: int, event: object) -> None:
            spawn = registry.launcher("spawn")
            assert isinstance(spawn, SpawnLauncher) and spawn._server is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(spawn._server._child.pid, signal.SIGKILL)

        def output(self, line: str) -> None: ...

    folder = RunDir(echo("spawn", {"*": "nothing"}).run.path.with_name("killed"))
    result = run_job(echo_plan("spawn", {"*": "for ever"}), folder, Killer())
    assert result.status == "failed" and result.signal == 9
    died = (
        r"^the process that rank [01] of 2 was forked from was killed by signal 9 \(SIGKILL\)\. The kernel does so when memory"
    )
    assert re.search(died, result.message)
    assert echo("spawn", {"*": "nothing"}).result.status == "ok"


def test_ranks_that_cannot_be_started_fail_their_run_alone(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OwnProcess._open

    def refuse_rank_1(command: Sequence[str], environment: Mapping[str, str], *rest: Any) -> Any:
        if environment["RANK"] == "1":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return opened(command, environment, *rest)

    descriptors = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(OwnProcess, "_open", staticmethod(refuse_rank_1))
        echoed = echo("launch", {"*": "for ever"})
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert echoed.result.message == "the ranks could not be started: [Errno 11] Resource temporarily unavailable."
    assert json.loads(echoed.run.result.read_text())["status"] == "failed"
    spawn = registry.launcher("spawn")
    assert isinstance(spawn, SpawnLauncher)
    spawn.warm()._child.kill()
    assert "ranks are forked from has died (status -9)" in echo("spawn", {"*": "nothing"}).result.message
    assert [echo(how, {"*": "nothing"}).result.status for how in ("launch", "spawn")] == ["ok", "ok"]


def test_folder_of_an_earlier_run_does_not_answer_for_the_new_one(how: str, echo: Echo, tmp_path: Path) -> None:
    first = echo(how, {"*": "lines"}, folder=tmp_path / "one")
    second = echo(how, {"1": "raise"}, folder=tmp_path / "one", nprocs=2)
    third = echo(how, {"*": "nothing"}, folder=tmp_path / "one", nprocs=1)
    assert [e.result.status for e in (first, second, third)] == ["ok", "failed", "ok"]
    assert second.heard.output_lines == [] and third.heard.output_lines == []
    assert not third.run.records(1).exists() and not third.run.error(1).exists()

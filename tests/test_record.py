"""Records: what is written is what is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from harness.errors import NotComparable
from harness.run.folder import RunDir, has_end, read_json, write_json
from harness.run.json_text import from_json_text, json_text
from harness.run.plan import RunPlan, Task, TrainPlan
from harness.run.record import (
    FORMAT,
    Evaluation,
    Failure,
    RankResult,
    RunResult,
    Step,
    check_format,
    run_result_from_json,
    to_json,
)
from harness.run.recorder import Recorder, failure_of

FAILURE = Failure("ValueError", 'bad "x"', "mine.py:7", "Traceback ...", False, 5.0)


def result() -> RunResult:
    steps = (Step(0, 4.0, 2.0, 0.1, 0.5, 10.0), Step(1, math.nan, 2.0, 0.1, 0.25, 11.0, skipped=True))
    rank = RankResult(
        rank=0,
        pid=17,
        marks={"code entered": 1.0},
        facts={"threads": 2},
        steps=steps,
        evaluations=(Evaluation(1, {"accuracy": (9.0, 10.0)}),),
        digests=({"parameters": "ab"},),
        status="raised",
        code=1,
        failure=FAILURE,
        value=[1, 2],
        t_end=12.0,
    )
    return RunResult("failed", (rank, RankResult(1)), "rank 0 of 2 failed", 0, (1,), 1, None, {"called": 0.0})


def test_round_trip(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", to_json(result()))
    assert repr(run_result_from_json(read_json(tmp_path / "result.json"))) == repr(result())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {"a": [1, [-math.inf]]}, "NaN", "'-Infinity", "a NaN", "nan"])
def test_what_json_has_no_number_for_is_written_as_json_and_comes_back(value: object) -> None:
    text = json_text(value)
    json.loads(text, parse_constant=pytest.fail)
    assert repr(from_json_text(text)) == repr(value)


def test_bare_words_of_older_records_are_read() -> None:
    assert repr(from_json_text('{"loss_sum": NaN, "quantity": -Infinity}')) == "{'loss_sum': nan, 'quantity': -inf}"


def test_every_file_of_a_run_whose_loss_is_not_finite_is_json(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Recorder(run.records(0)) as record:
        record.step(result().ranks[0].steps[1])
        record.evaluation(Evaluation(1, {"loss": (math.inf, 2.0)}))
        record.end("ok", 0, value=math.nan)
    write_json(run.result, to_json(result()))
    write_json(run.evidence, {"losses": [math.nan]})
    for text in [*run.records(0).read_text().splitlines(), run.result.read_text(), run.evidence.read_text()]:
        json.loads(text, parse_constant=pytest.fail)
    step, evaluation, end = run.events(0)
    assert math.isnan(step["loss_sum"]) and evaluation["metrics"]["loss"] == [math.inf, 2.0] and math.isnan(end["value"])


def test_newer_format_is_refused(tmp_path: Path) -> None:
    newer, run = {"format": FORMAT + 1}, RunDir(tmp_path)
    with pytest.raises(
        NotComparable, match=rf"^a\.json has format {FORMAT + 1}, and this harness reads up to {FORMAT}: update it\.$"
    ):
        check_format(newer, "a.json")
    with pytest.raises(NotComparable, match=r"^rank-1\.jsonl has format"):
        RankResult.from_events(1, [{"event": "start", **newer, "pid": 1, "marks": {}}])
    RunPlan(Task("script")).write(run)
    run.plan.write_text(json.dumps(json.loads(run.plan.read_text()) | newer))
    with pytest.raises(NotComparable, match=r"plan\.json has format"):
        RunPlan.read(run)


def test_events_become_the_same_record(tmp_path: Path) -> None:
    run, expected = RunDir(tmp_path), result().ranks[0]
    with Recorder(run.records(0)) as record:
        record.start(17, 1.0)
        record.facts(threads=2)
        for step in expected.steps:
            record.step(step)
        record.evaluation(expected.evaluations[0])
        record.event("digest", **expected.digests[0])
        record.log("WARNING", "text")
        record.end("raised", 1, FAILURE, [1, 2])
    read = RankResult.from_events(0, run.events(0))
    assert repr(read).rpartition("t_end=")[0] == repr(expected).rpartition("t_end=")[0]
    assert has_end(run.records(0))


def test_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Recorder(run.records(0)) as record:
        record.start(17, 1.0)
    with run.records(0).open("a") as file:
        file.write('{"event": "end", "sta')
    assert [(event["event"], event["format"]) for event in run.events(0)] == [("start", FORMAT)]
    assert RankResult.from_events(0, run.events(0)).status == "unfinished"


@pytest.mark.parametrize("content", ["", '{"event": "start", "pid": 1, "marks": {}}\n', '{"event": "log", "text": "end"}\n'])
def test_no_end(content: str, tmp_path: Path) -> None:
    assert not has_end(tmp_path / "absent")
    (tmp_path / "rank-0.jsonl").write_text(content)
    assert not has_end(tmp_path / "rank-0.jsonl")


@pytest.mark.parametrize("value", [1, 1.5, "a", None, [1], {"a": 1}])
def test_plain_value_is_in_the_record(value: object, tmp_path: Path) -> None:
    with Recorder(tmp_path / "r") as record:
        record.end("ok", 0, value=value)
    assert json.loads((tmp_path / "r").read_text())["value"] == value


def endless() -> list[object]:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize("value", [object(), {1, 2}, "x" * 20_000, list(range(50_000)), {(1, 2): 3}, endless()])
def test_value_that_json_cannot_hold_spoils_no_record(value: object, tmp_path: Path) -> None:
    with Recorder(tmp_path / "r") as record:
        record.end("ok", 0, value=value)
    assert json.loads((tmp_path / "r").read_text())["value"] is None


def test_plan_round_trip(tmp_path: Path) -> None:
    task = Task("script", path="a b.py", arguments=("--x", "y z"))
    train = TrainPlan({"_target_": "recipes.mnist.Mnist", "lr": 0.1})
    plan = RunPlan(task, nprocs=2, devices=("0", "1"), settings={"A": "1"}, argv=("a",), sys_path=("/x",), train=train)
    run = RunDir(tmp_path)
    plan.write(run)
    assert RunPlan.read(run) == plan


def raises(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_failure_names_the_users_line() -> None:
    failure = failure_of(raises(KeyError("x")), str(Path(__file__).parent))
    assert failure.where.startswith("test_record.py:") and failure.type == "KeyError"


def test_failure_behind_a_library_names_the_cause() -> None:
    try:
        json.loads("[1,", object_hook=None)
    except ValueError as error:
        # No line but this file's calls are the user's.
        assert failure_of(error).where.rpartition(":")[0].endswith("test_record.py")


def test_failure_tells_the_first_cause_where_its_own_words_do_not() -> None:
    """As a library does whose lazy import failed."""
    missing = raises(ModuleNotFoundError("No module named 'tokens'"))
    failure = failure_of(raises(RuntimeError("Could not import Model"), raises(ImportError("models.py"), missing)))
    assert (failure.message, failure.cause) == ("Could not import Model", "ModuleNotFoundError: No module named 'tokens'")
    assert failure_of(raises(RuntimeError("models.py: No module named 'tokens'"), missing)).cause == ""
    assert failure_of(missing).cause == ""


class DistFakeError(RuntimeError):
    pass


DistFakeError.__module__ = "torch.distributed"


def test_consequence_in_disguise_is_still_one() -> None:
    closed = raises(DistFakeError("Connection closed by peer"))
    assert failure_of(closed).collective
    assert failure_of(raises(ValueError("training failed"), closed)).collective
    assert not failure_of(raises(RuntimeError("Connection closed by peer"))).collective

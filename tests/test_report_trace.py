"""The ranks' traces on one time line; torch's profiler is tried in one process."""

import json

import pytest

from harness.report.sweep.build import sweep_report
from harness.report.trace import Trace, clock_offset_us, merged, phases_of
from harness.run.folder import CLOCK_EVENT, RunDir
from harness.training.profiling import StepProfile
from tests.reports import MACHINE, job_of
from tests.test_trainer import toys, trainer


def trace(pid, began_us, clock_ns):
    """Return a trace whose clock stood at ``began_us`` when CLOCK_MONOTONIC stood at ``clock_ns``."""
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "name": f"{CLOCK_EVENT} {clock_ns}", "pid": pid, "tid": pid, "ts": began_us, "dur": 1},
        {"ph": "X", "name": "step 3", "pid": pid, "tid": pid, "ts": began_us + 100, "dur": 50},
        {"ph": "s", "name": "flow", "id": 7, "pid": pid, "tid": pid, "ts": began_us + 110},
        {"ph": "X", "name": "kernel", "pid": "Spans", "tid": 1, "ts": began_us + 120, "dur": 1},
    ]
    return {"schemaVersion": 1, "traceEvents": events}


def named(joined, name):
    return [event for event in joined["traceEvents"] if event["name"] == name]


def test_ranks_meet_on_one_clock():
    # Rank 1's clock shows another time, and it begins its step 20 us later.
    joined = merged({0: trace(11, 5_000, 10_000_000_000), 1: trace(12, 90_000, 10_000_020_000)}, {}, origin_s=9.0)
    assert [event["ts"] for event in named(joined, "step 3")] == [1_000_100, 1_000_120]
    assert [event["pid"] for event in named(joined, "step 3")] == [0, 100]
    names = {event["pid"]: event["args"]["name"] for event in named(joined, "process_name")}
    assert names == {0: "rank 0", 1: "rank 0: Spans", 100: "rank 1", 101: "rank 1: Spans"}
    assert [event["id"] for event in named(joined, "flow")] == ["0.7", "1.7"]


def test_a_trace_without_a_clock_is_refused():
    with pytest.raises(ValueError, match="has no event 'CLOCK_MONOTONIC'"):
        clock_offset_us({"traceEvents": [{"ph": "X", "name": "step 3", "ts": 1}]})


def test_phases_stand_above_the_steps(tmp_path):
    job = job_of(0, nprocs=2, folder=str(tmp_path))
    run = RunDir(tmp_path)
    for rank in range(2):
        run.trace(rank).write_text(json.dumps(trace(rank + 20, 5_000, 100_000_000_000)))
    Trace().report(sweep_report(str(tmp_path), [job], MACHINE))
    joined = json.loads(run.whole_trace.read_text())
    (built, _) = named(joined, "DDP built (framework)")
    assert (built["ts"], built["dur"]) == (pytest.approx(1.5e6), pytest.approx(0.3e6))
    assert {event["pid"] for event in joined["traceEvents"]} == {0, 1, 100, 101}
    assert phases_of(job)[0][0] == ("process exists (launcher)", 98.0, pytest.approx(98.1))


def test_jobs_without_traces_are_left_alone(tmp_path):
    Trace().report(sweep_report(str(tmp_path), [job_of(0, folder=str(tmp_path))], MACHINE))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_profiles_its_steps_after_the_warm_up(tmp_path):
    made = trainer(toys.Points(18))
    profile = StepProfile(made, tmp_path / "trace-0.json", 2)
    for number, taken in enumerate(made.steps()):
        with profile.part(f"step {number}"):
            made.step(*taken)
        profile.after(number + 1, number == 3)
    written = json.loads((tmp_path / "trace-0.json").read_text())
    names = [event.get("name") for event in written["traceEvents"] if event.get("cat") == "user_annotation"]
    assert {"step 2", "step 3", "accumulate", "update"} <= set(names) and "step 1" not in names
    joined = merged({0: written}, {}, 0.0)
    assert len(named(joined, "step 3")) >= 1

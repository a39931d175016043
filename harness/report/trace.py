"""The traces of a job's ranks, joined on one time line: ``trace.json``, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compare.performance.phases import Phase, phases
from harness.report.figures.timeline import marks_of
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.run.folder import CLOCK_EVENT, RunDir, write_json

PROCESSES_OF_A_RANK = 100
"""Room for the processes (CPU, devices) that one rank's trace tells of."""
PHASES_ROW = 0
"""Thread number of a rank's phases, which no real thread has."""


class Trace:
    """Writes ``trace.json`` into the folder of each job that was profiled."""

    def report(self, sweep: SweepReport) -> None:
        """Write them."""
        for job in sweep.jobs:
            run = RunDir(job.folder)
            paths = {rank.rank: run.trace(rank.rank) for rank in job.result.ranks if run.trace(rank.rank).exists()}
            if paths:
                traces = {rank: json.loads(path.read_text()) for rank, path in paths.items()}
                write_json(run.whole_trace, merged(traces, phases_of(job), job.result.marks.get("called", 0.0)))


def trace_of(job: JobReport) -> Path | None:
    """Return the trace of a job that was profiled: of all ranks, or of the first where nobody has joined them; else None."""
    run = RunDir(job.folder)
    paths = [run.whole_trace, *(run.trace(rank.rank) for rank in job.result.ranks)]
    profiled = job.plan.train is not None and job.plan.train.profile
    return next((path for path in paths if path.exists()), None) if profiled else None


Span = tuple[str, float, float]
"""Name, begin and end by CLOCK_MONOTONIC, in seconds."""


def phases_of(job: JobReport) -> dict[int, list[Span]]:
    """Return when each rank was in which phase."""
    spans = {}
    for rank in job.result.ranks:
        marks = marks_of(job, rank)
        spans[rank.rank] = list(_spans(phases(marks), min(marks.values(), default=0.0)))
    return spans


def _spans(parts: Sequence[Phase], begin: float) -> Iterator[Span]:
    for part in parts:
        # Phases join without a gap, so that one begins where the one before it ended.
        yield f"{part.phase} ({part.owner})", begin, begin + part.seconds
        begin += part.seconds


def merged(traces: Mapping[int, Mapping[str, Any]], spans: Mapping[int, Sequence[Span]], origin_s: float) -> dict[str, Any]:
    """Return one trace of all ranks, each with its phases, in which time counts from ``origin_s``.

    Each rank's own trace tells what CLOCK_MONOTONIC was at one of its events, which is the same clock for all of a machine.

    Args:
        traces: Of each rank, as torch's profiler writes them.
        spans: Of each rank.
        origin_s: By CLOCK_MONOTONIC, in seconds.
    """
    events: list[dict[str, Any]] = []
    for rank, trace in traces.items():
        # In microseconds since the call, so that the time line begins at 0 and not days after the machine's start.
        # digits.
        shift_us = clock_offset_us(trace) - origin_s * 1e6
        events += _moved(rank, trace["traceEvents"], shift_us)
        events += [
            _phase(rank, name, (begin - origin_s) * 1e6, (end - begin) * 1e6) for name, begin, end in spans.get(rank, ())
        ]
        events.append(_named(rank * PROCESSES_OF_A_RANK, PHASES_ROW, "thread_name", "phases"))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def clock_offset_us(trace: Mapping[str, Any]) -> float:
    """Return what added to a trace's times gives CLOCK_MONOTONIC, in microseconds.

    Raises:
        ValueError: The trace has no event that tells.
    """
    for event in trace["traceEvents"]:
        if str(event.get("name", "")).startswith(CLOCK_EVENT) and "ts" in event:
            # The event's name ends in the clock, in nanoseconds; its own time is the trace's, in microseconds.
            return int(event["name"].rpartition(" ")[2]) / 1e3 - float(event["ts"])
    raise ValueError(f"the trace has no event {CLOCK_EVENT!r}")


def _moved(rank: int, events: Sequence[Mapping[str, Any]], shift_us: float) -> Iterator[dict[str, Any]]:
    # The first process is the rank itself; ids that join events belong to one rank.
    processes = list(dict.fromkeys(event["pid"] for event in events if "pid" in event))
    # Anew, as viewers join processes of one number, and ranks may have the same (0 for the first device).
    numbers = {process: rank * PROCESSES_OF_A_RANK + n for n, process in enumerate(processes)}
    for process, number in numbers.items():
        name = f"rank {rank}" if number % PROCESSES_OF_A_RANK == 0 else f"rank {rank}: {process}"
        yield _named(number, 0, "process_name", name)
    for event in events:
        # Names and order of processes are told anew, as their numbers are new.
        if event.get("ph") == "M" and event.get("name") != "thread_name":
            continue
        moved = {**event, "pid": numbers[event["pid"]]} if "pid" in event else dict(event)
        if "ts" in event:
            moved["ts"] = float(event["ts"]) + shift_us
        if "id" in event:
            # Arrows are drawn between equal ids, and two ranks may use the same.
            moved["id"] = f"{rank}.{event['id']}"
        yield moved


def _phase(rank: int, name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "phase", "name": name, "pid": rank * PROCESSES_OF_A_RANK, "tid": PHASES_ROW, "ts": ts, "dur": dur}


def _named(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

"""What a rank writes down while it runs: an event a line, whole, at once."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.errors import BackendUnavailable, ConfigError, HarnessError, Mismatch
from harness.run.folder import write_whole
from harness.run.json_text import json_text
from harness.run.record import FORMAT, Evaluation, Failure, Step
from harness.run.visible import visible

# What gloo, NCCL and torch's store say when the other side is gone or silent.
_COLLECTIVE = re.compile(r"Connection (closed|reset) by peer|gloo|NCCL|Timed out waiting|Socket Timeout|store", re.IGNORECASE)
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
# With a separator behind: a user's folder may have a name that begins like a library's.
_NOT_USERS = tuple(os.path.realpath(path) + os.sep for path in [*_LIBRARIES, os.path.dirname(os.path.dirname(__file__))])


MESSAGE_LENGTH = 4_000
TRACEBACK_LENGTH = 40_000
"""Longest texts of a failure, in characters."""


class Recorder:
    """Appends to ``rank-N.jsonl``; a line is one ``write``, so that a kill loses nothing that was recorded."""

    def __init__(self, path: Path) -> None:
        # A rank that torch's agent starts again goes on in the same file: its readers keep their place.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # A process that the task forks has this recorder too, and must not tell how the rank ended.
        self.owner = os.getpid()
        self.step_now: int | None = None
        """The step of the training that is being taken; None before and after it."""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._file)

    def event(self, kind: str, /, **body: Any) -> None:
        """Append one event."""
        os.write(self._file, json_text({"event": kind, **body}).encode() + b"\n")

    def start(self, pid: int, entered: float) -> None:
        """Record that this rank's code runs; ``entered`` is CLOCK_MONOTONIC in seconds."""
        self.event("start", format=FORMAT, pid=pid, marks={"code entered": entered})

    def mark(self, name: str) -> None:
        """Record the end of a phase."""
        self.event("mark", name=name, t=time.monotonic())

    def facts(self, **facts: Any) -> None:
        """Record what this rank sees of itself."""
        self.event("facts", **facts)

    def step(self, step: Step) -> None:
        """Record a step."""
        # Not by asdict(), which copies what it comes to: a step is recorded within the time of the next one.
        self.event("step", **vars(step))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation."""
        self.event("evaluation", **dataclasses.asdict(evaluation))

    def scalar(self, name: str, value: float, step: int) -> None:
        """Record a number of the user's own."""
        self.event("scalar", name=name, value=value, step=step)

    def log(self, level: str, text: str) -> None:
        """Record a log record that the parent shall show."""
        self.event("log", level=level, text=text)

    def end(self, status: str, code: int, failure: Failure | None = None, value: Any = None) -> None:
        """Record how it ended; nothing follows."""
        body = dataclasses.asdict(failure) if failure else None
        self.event("end", status=status, code=code, failure=body, value=_as_json(value), t=time.monotonic())

    def value(self, path: Path, value: Any) -> None:
        """Keep what the task returned, with its type; one that cannot be pickled is named in the log and lost.

        Raises:
            HarnessError: It cannot be written.
        """
        # No file is read as None.
        if value is None:
            return
        try:
            content = pickle.dumps(value)
        except Exception as error:
            self.log("WARNING", f"the task's return value ({type(value).__name__}) cannot be pickled and is lost: {error}")
            return
        try:
            write_whole(path, content)
        except OSError as error:
            raise HarnessError(f"what the task returned ({len(content)} bytes) cannot be written: {error.strerror}.") from error

    def error(self, path: Path, error: BaseException) -> None:
        """Keep the exception with its type, where it survives pickling and can be written; its text is in the record."""
        try:
            content = pickle.dumps(error)
            # Many exceptions can be pickled and then not read: those with arguments of their own, for instance.
            pickle.loads(content)
            write_whole(path, content)
        except Exception:
            return


def failure_of(error: BaseException, cwd: str | None = None) -> Failure:
    """Return an exception as text; paths below ``cwd`` are relative to it."""
    return Failure(
        type=type(error).__name__,
        message=_text_of(error),
        # A message of ours says what to mend; the line in here that raised it would only lead away.
        where="" if isinstance(error, HarnessError) else _where(error, cwd or os.getcwd()),
        traceback=_traceback_of(error),
        collective=any(map(_is_collective, _chain(error))),
        t=time.monotonic(),
        mistake=isinstance(error, ConfigError | BackendUnavailable | Mismatch),
        cause=_first_cause(error),
    )


def _first_cause(error: BaseException) -> str:
    """Return what an exception was raised from, first of all: a library's own words often hide which import failed."""
    # Nothing in Python keeps a chain of causes from being a circle.
    first, seen = error, {id(error)}
    while first.__cause__ is not None and id(first.__cause__) not in seen:
        first = first.__cause__
        seen.add(id(first))
    text = _text_of(first)
    return "" if text in _text_of(error) else f"{type(first).__name__}: {text}"


def _traceback_of(error: BaseException) -> str:
    if isinstance(error, HarnessError):
        return f"{type(error).__name__}: {_text_of(error)}"
    lines = traceback.format_exception(type(error), error, _from_users_code(error.__traceback__))
    return _shortened("".join(lines), TRACEBACK_LENGTH)


def _text_of(error: BaseException) -> str:
    try:
        # This runs the __str__ of a user's class, which may raise as well.
        return _shortened(str(error), MESSAGE_LENGTH)
    except Exception as broken:
        return f"(its text cannot be had: {type(broken).__name__})"


def _shortened(text: str, length: int) -> str:
    """Return text that can be shown, cut in the middle where it is very long."""
    # Both ends are kept: of a traceback, how it was come to and what was raised.
    if len(text) > length:
        text = f"{text[: length // 2]}\n... ({len(text)} characters in all) ...\n{text[-length // 2 :]}"
    return visible(text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from or while handling."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that led to the user's own; whole where there is none of these."""
    own = trace
    while own is not None and _is_library(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    return own or trace


def _where(error: BaseException, cwd: str) -> str:
    """Return the line that raised, if it is the user's; else the cause's, behind what a library made of it; else any."""
    stacks = [frames for cause in _chain(error) if (frames := traceback.extract_tb(cause.__traceback__))]
    for frames in stacks:
        if not _is_library(frames[-1].filename):
            return _shown(frames[-1], cwd)
    users = [frame for frames in reversed(stacks) for frame in reversed(frames) if not _is_library(frame.filename)]
    return _shown((users or [stacks[0][-1]])[0], cwd) if stacks else ""


def _shown(frame: traceback.FrameSummary, cwd: str) -> str:
    path = frame.filename
    if path.startswith(cwd.rstrip(os.sep) + os.sep):
        path = os.path.relpath(path, cwd)
    return f"{path}:{frame.lineno}"


def _is_library(path: str) -> bool:
    # <string> and the like are no files to open; a library may be reached by a link, as in an environment.
    return path.startswith("<") or os.path.realpath(path).startswith(_NOT_USERS)


def _is_collective(error: BaseException) -> bool:
    # An error of ours says so itself.
    if (known := getattr(error, "is_consequence", None)) is not None:
        return bool(known)
    # DistBackendError and its kin, by name: there is no torch in here to ask.
    if type(error).__name__.startswith("Dist") and type(error).__module__.startswith("torch"):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # Backends raise a bare RuntimeError, which only its place and its words tell from the user's own.
    frames = traceback.extract_tb(error.__traceback__)
    # DDP reduces within the backward pass, so that the last frame may be autograd's.
    in_torch = any(f"torch{os.sep}distributed" in f.filename or f"torch{os.sep}autograd" in f.filename for f in frames)
    return in_torch and bool(_COLLECTIVE.search(str(error)))


def _as_json(value: Any) -> Any:
    """Return ``value`` where JSON holds it as it is, else None: the pickle beside the record holds the rest."""
    # Else a large value is written out only to be thrown away.
    if sys.getsizeof(value) > 100_000:
        return None
    try:
        return value if len(json.dumps(value)) < 10_000 else None
    except Exception:
        return None

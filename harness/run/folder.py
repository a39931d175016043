"""RunDir: the folder of one run, and the only place that knows the names of the files in it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.run.json_text import from_json_text, json_text

TRIALS = "trials"
"""Folder, inside a job's, of the launches that were made to compare launchers."""
RESUMING = "resuming"
"""Folder, inside a job's, of the runs that were made to see whether its training can be interrupted."""

CLOCK_EVENT = "CLOCK_MONOTONIC"
"""Name of a trace's event which tells that clock's nanoseconds: they follow the name."""


_PASSING = (".stacks-*.txt", ".ending-*.json", ".capture-*.pt", ".*.aside")
"""Files of a rank that mean nothing after the run; one that is killed leaves them."""


class RunDir:
    """The files of one run. Whole files are written aside and renamed; only ``rank-N.jsonl`` and ``rank-N.log`` grow."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Absolute, as the process may change its folder; links stay, so that it is shown as it was typed.
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def plan(self) -> Path:
        """What is to be run (JSON)."""
        return self.path / "plan.json"

    @property
    def config(self) -> Path:
        """The resolved Hydra configuration, with its types (pickle)."""
        return self.path / "config.pkl"

    @property
    def call(self) -> Path:
        """Function and arguments of ``harness.spawn`` (pickle)."""
        return self.path / "call.pkl"

    @property
    def result(self) -> Path:
        """What came out (JSON)."""
        return self.path / "result.json"

    @property
    def stacks(self) -> Path:
        """Where every rank stood when the run was found to hang."""
        return self.path / "stacks.txt"

    @property
    def whole_trace(self) -> Path:
        """What all ranks did inside their steps, on one time line (Chrome's trace format)."""
        return self.path / "trace.json"

    @property
    def store(self) -> Path:
        """Address of the rendezvous store; there only while the run lasts."""
        return self.path / "store.json"

    @property
    def launcher_log(self) -> Path:
        """What the processes printed that are not ranks (torch's elastic agent, an interpreter that did not start)."""
        return self.path / "launcher.log"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.path / "checkpoint.pt"

    @property
    def weights(self) -> Path:
        """The trained model's parameters and buffers; ``.pt`` where safetensors cannot hold them."""
        return self.path / "model.safetensors"

    @property
    def best_weights(self) -> Path:
        """Those of the evaluation that was best by ``keep_best``."""
        return self.path / "best.safetensors"

    @property
    def evidence(self) -> Path:
        """What the verification saw (JSON)."""
        return self.path / "evidence.json"

    @property
    def audit(self) -> Path:
        """What injected faults and correct runs came to (JSON)."""
        return self.path / "audit.json"

    def capture(self, rank: int) -> Path:
        """What ``rank`` captured of one step, on its way to rank 0."""
        return self.path / f".capture-{rank}.pt"

    def records(self, rank: int) -> Path:
        """What ``rank`` recorded, an event a line (JSON lines)."""
        return self.path / f"rank-{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        """What ``rank`` did inside its steps (Chrome's trace format)."""
        return self.path / f"trace-{rank}.json"

    def log(self, rank: int) -> Path:
        """What ``rank`` printed or logged."""
        return self.path / f"rank-{rank}.log"

    def rank_stacks(self, rank: int) -> Path:
        """Stacks that ``rank`` writes when asked to."""
        return self.path / f".stacks-{rank}.txt"

    @property
    def temp_dir(self) -> Path:
        """Names the run's private folder for sockets and the like (text); there only while the run lasts."""
        return self.path / ".temp_dir"

    def ending(self, rank: int) -> Path:
        """How the process of ``rank`` ended, where torch's elastic agent is its parent (JSON)."""
        return self.path / f".ending-{rank}.json"

    def value(self, rank: int) -> Path:
        """What ``rank``'s task returned (pickle)."""
        return self.path / f"value-{rank}.pkl"

    def error(self, rank: int) -> Path:
        """The exception that ended ``rank`` (pickle); absent where it cannot be pickled."""
        return self.path / f"error-{rank}.pkl"

    def clear(self) -> None:
        """Remove what an earlier run has left in the same folder, but for what the new one may go on from."""
        names = ("rank-*.jsonl", "rank-*.log", "value-*.pkl", "error-*.pkl", "trace*.json", *_PASSING)
        for inside in (TRIALS, RESUMING):
            shutil.rmtree(self.path / inside, ignore_errors=True)
        whole = (self.result, self.evidence, self.audit, self.stacks, self.store, self.temp_dir, self.launcher_log)
        for path in [*whole, *(path for name in names for path in self.path.glob(name))]:
            path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what has no meaning after a run."""
        for path in [self.store, *(path for name in _PASSING for path in self.path.glob(name))]:
            path.unlink(missing_ok=True)
        if self.launcher_log.exists() and not self.launcher_log.stat().st_size:
            self.launcher_log.unlink()

    def trial(self, order: int) -> RunDir:
        """The folder of one launch of a comparison of launchers."""
        return RunDir(self.path / TRIALS / str(order))

    @property
    def interrupted(self) -> RunDir:
        """The folder of the run that takes the first step of this one's training, and leaves a checkpoint."""
        return RunDir(self.path / RESUMING / "interrupted")

    @property
    def resumed(self) -> RunDir:
        """The folder of the run that goes on from there."""
        return RunDir(self.path / RESUMING / "resumed")

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return the whole events that ``rank`` has recorded so far, since it was last started.

        A line that was cut off by a kill is left out.
        """
        events = list(read_events(self.records(rank)))
        # torch's agent starts ranks again in the same files.
        starts = [number for number, event in enumerate(events) if event["event"] == "start"]
        return events[starts[-1] :] if starts else events


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete events of a ``rank-N.jsonl``."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            # What lacks its end is being written just now, or was cut off by a kill.
            if line.endswith(b"\n"):
                yield from_json_text(line)


def read_value(run: RunDir, rank: int = 0) -> Any:
    """Return what a rank's task returned, with its type."""
    path = run.value(rank)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def has_end(path: Path) -> bool:
    """Return True where a ``rank-N.jsonl`` has its last line."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        # Enough for the last line, which holds a failure's texts and a returned value, of a file that may be large.
        file.seek(max(0, path.stat().st_size - 1_000_000))
        *_, last = [b"", *file.read().splitlines()]
    # As the recorder writes it, with the kind first: the line may be long, and is not parsed for this.
    return last.startswith(b'{"event": "end"')


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that a reader sees all of ``content`` or what was there before, never a part."""
    # Beside it, as a rename is whole within one file system only; by the process's number, as several may write at once.
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    # Ctrl-C included: the part that was written is of use to nobody.
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, whole."""
    write_whole(path, json_text(content, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Return what :func:`write_json` wrote."""
    return from_json_text(path.read_text())

"""A job of a sweep, and the folder that it has to itself."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import HarnessError
from harness.run.folder import RunDir
from harness.run.plan import RunPlan


@dataclass(frozen=True)
class Job:
    """One job of a sweep, ready to start.

    Attributes:
        overrides: What the user typed for it.
        label: Setting -> value for what the sweep varies, in the order of the columns.
    """

    plan: RunPlan
    run: RunDir
    overrides: Sequence[str] = ()
    label: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def alone_in(folder: Path, setting: str = "hydra.sweep.dir") -> Iterator[None]:
    """Keep other commands from running in the same folder meanwhile; ``setting`` chooses another.

    Raises:
        HarnessError: One does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("w") as file:
        try:
            # The kernel gives a lock up with its process, however that ends; a file that names one outlives a kill.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HarnessError(
                f"another command is running in {folder}: wait for it, or choose another folder with {setting}=FOLDER."
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

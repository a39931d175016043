"""Reporters: what a sweep's results are handed to. They are chosen in ``conf/report/``.

A reporter of your own is one class and one YAML. The class needs none of ours as its base, and only the methods that it
wants of :class:`Reporter`:

.. code-block:: python

    # my_reports.py
    class Best:
        def __init__(self, file: str) -> None:
            self.file = file

        def report(self, sweep):
            best = min(sweep.jobs, key=lambda job: job.result.losses()[-1])
            open(self.file, "w").write(best.folder)

.. code-block:: yaml

    # conf/report/mine.yaml, or my_conf/report/mine.yaml with --config-dir my_conf
    defaults: [default, _self_]       # all that default shows, and
    reporters:
      best: {_target_: my_reports.Best, file: best.txt}

``python run.py report=mine`` uses it, given ``my_reports`` can be imported (``PYTHONPATH=.``). ``report.reporters.html=null``
leaves one out. ``python -m harness.compare`` uses it again, by the rules of :mod:`harness.report.recorded`.
``examples/reports/`` holds reporters for MLflow and Weights & Biases.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from harness.report.sweep.sweep_report import SweepReport
from harness.run.visible import visible

if TYPE_CHECKING:
    from harness.run.job import Job
    from harness.run.record import RunResult


class Reporter(Protocol):
    """Whoever shows a sweep. Each method may be missing."""

    def begin(self, folder: str, jobs: Sequence[Job]) -> None:
        """Take in the sweep's folder and what is about to run, before the first job starts."""

    def started(self, job: Job) -> None:
        """Take in that a job starts; what follows until its end is of this job."""

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """Take in one event of one rank, while the job runs: keep it short."""

    def output(self, line: str) -> None:
        """Take in one line that rank 0 printed."""

    def ended(self, job: Job, result: RunResult) -> None:
        """Take in how a job ended."""

    def report(self, sweep: SweepReport) -> None:
        """Show the sweep, after its last job."""

    def close(self) -> None:
        """Let go of files and screen; called last, after an interruption too."""


class Reporters:
    """All reporters of a sweep, as one. One that raises is named, left out from then on, and stops nothing."""

    def __init__(self, reporters: Mapping[str, Any]) -> None:
        self._reporters = dict(reporters)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Reporters:
        """Return those of a resolved ``report`` group; without one, the terminal alone.

        Raises:
            ConfigError: A ``_target_`` cannot be made.
        """
        # Somebody else's app has no report group, and its user still wants to see how jobs end.
        if config is None:
            from harness.report.terminal import Terminal

            return cls({"terminal": Terminal()})
        chosen = {name: node for name, node in (config.get("reporters") or {}).items() if node is not None}
        return cls({name: make(name, node) for name, node in chosen.items()})

    def include_terminal(self) -> bool:
        """Return True where failures are told on the screen."""
        from harness.report.terminal import Terminal

        return any(isinstance(reporter, Terminal) for reporter in self._reporters.values())

    def begin(self, folder: str, jobs: Sequence[Job]) -> None:
        """See :class:`Reporter`."""
        self._tell("begin", folder, visible(jobs))

    def started(self, job: Job) -> None:
        """See :class:`Reporter`."""
        self._tell("started", visible(job))

    def event(self, rank: int, event: Mapping[str, Any]) -> None:
        """See :class:`Reporter`."""
        # What a rank logs is shown as it says it, as what rank 0 prints is.
        self._tell("event", rank, event if event["event"] == "log" else visible(event))

    def output(self, line: str) -> None:
        """See :class:`Reporter`."""
        self._tell("output", line)

    def ended(self, job: Job, result: RunResult) -> None:
        """See :class:`Reporter`."""
        self._tell("ended", visible(job), visible(result))

    def report(self, sweep: SweepReport) -> None:
        """See :class:`Reporter`. The terminal comes last, as it says what the others wrote."""
        names = sorted(self._reporters, key=lambda name: name == "terminal")
        for name in names:
            self._tell_one(name, "report", (sweep,))

    def close(self) -> None:
        """See :class:`Reporter`."""
        self._tell("close")

    def _tell(self, method: str, *arguments: Any) -> None:
        # A list, as one that fails is taken out on the way.
        for name in list(self._reporters):
            self._tell_one(name, method, arguments)

    def _tell_one(self, name: str, method: str, arguments: Sequence[Any]) -> None:
        # By name and not by base class, so that a class of the user's needs no import of ours.
        told = getattr(self._reporters[name], method, None)
        if told is None:
            return
        try:
            told(*arguments)
        except Exception as error:  # a report must not cost the training that it reports
            del self._reporters[name]
            message = f"report.reporters.{name} failed and is left out: {type(error).__name__}: {error}"
            print(visible(message), file=sys.stderr)


def make(name: str, node: Mapping[str, Any]) -> Any:
    """Return a reporter of a ``report`` group.

    Raises:
        ConfigError: Its ``_target_`` cannot be made.
    """
    # Here, as only a process that makes reporters from a config needs Hydra.
    from hydra.errors import HydraException
    from hydra.utils import instantiate

    from harness.errors import ConfigError

    try:
        return instantiate(dict(node))
    except HydraException as error:
        # Hydra's own text names a setting of Hydra's for what its cause says.
        raise ConfigError(f"report.reporters.{name} cannot be made: {error.__cause__ or error}") from error

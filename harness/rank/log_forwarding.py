"""What ranks log and warn of, forwarded to the console of the parent."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from harness.run.recorder import Recorder


def name_rank_in_logs(rank: int) -> None:
    """Put this rank's number before the text of every log record."""
    make = logging.getLogRecordFactory()

    def make_with_rank(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        # In the text, because what handlers put before it is the user's to say; as an attribute for formats that want it apart.
        record.msg = f"[rank {rank}] {record.msg}"
        record.__dict__["rank"] = rank
        return record

    logging.setLogRecordFactory(make_with_rank)


def forward_logs(record: Recorder) -> None:
    """Let the parent's console show what the console handlers of this rank write to its log."""
    # By getLogger(): in the dictionary a name may also stand for a place that only has loggers below it.
    for logger in [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]:
        for handler in list(logger.handlers):
            if getattr(handler, "stream", None) in (sys.stdout, sys.stderr):
                logger.addHandler(_Forward(handler, record))


def forward_records(record: Recorder) -> None:
    """Let the parent's console show this rank's log records from WARNING on, whatever the script logs to."""
    make = logging.getLogRecordFactory()

    # By the factory: with a handler of ours a script's own basicConfig() would do nothing, and with force=True remove it.
    def make_and_forward(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        # The level of logging's last resort, by which a script that configures nothing shows its records.
        if made.levelno >= logging.WARNING:
            record.log(made.levelname, made.getMessage())
        return made

    logging.setLogRecordFactory(make_and_forward)


def forward_warnings(record: Recorder, rank: int | None = None) -> None:
    """Let the parent's console show this rank's warnings.

    Args:
        rank: This rank's number, where the parent shows what it gets word for word; None where it adds that itself.
    """
    show = warnings.showwarning

    def show_and_forward(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        kind = category.__name__
        record.log(kind, str(message) if rank is None else f"[rank {rank}] {kind}: {message}")
        show(message, category, *rest, **named)

    # Python's hook for what a warning is shown by: one that is filtered out, or caught by the script, does not come to it.
    warnings.showwarning = show_and_forward


class _Forward(logging.Handler):
    def __init__(self, twin: logging.Handler, record: Recorder) -> None:
        super().__init__(twin.level)
        self._twin = twin
        self._record = record

    def filter(self, record: logging.LogRecord) -> bool:
        return bool(self._twin.filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        self._record.log(record.levelname, self._twin.format(record))

"""From how a run failed to the exception that the caller of ``spawn`` sees."""

from __future__ import annotations

import pickle
from typing import Any

from harness.entrypoints.messages import details
from harness.errors import ConfigError, HarnessError, RankFailed, RunTimeout
from harness.run.folder import RunDir
from harness.run.record import RunResult


class RankTraceback(Exception):
    """What a rank left behind as text: the cause of the exception that its failure raises in the caller of ``spawn``."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def exception_of(result: RunResult, run: RunDir) -> BaseException:
    """Return the exception that a failed run raises in the caller of ``spawn``."""
    message = result.message
    error = _own_exception(result, run)
    if error is None:
        error = RunTimeout(message) if "hung" in result.marks else RankFailed(message)
    elif not isinstance(error, HarnessError):
        # A note, because only its class knows what its arguments mean.
        error.add_note(message)
    rank = next((r for r in result.ranks if r.rank == result.failed_rank), None)
    _attach(error, rank=result.failed_rank, pid=rank.pid if rank else None, exit_code=result.exit_code, signal=result.signal)
    text = details(result, run)
    # A mistake that is explained in one sentence needs no traceback, which would only hide it.
    if text and not isinstance(error, ConfigError):
        error.__cause__ = RankTraceback(text)
    return error


def _own_exception(result: RunResult, run: RunDir) -> Exception | None:
    """Return the exception of the rank that fell first, as it was; None where it did not survive, or must not."""
    # Ranks that hung were stopped: what one of them raised on its way out is not why the run failed.
    if result.failed_rank is None or "hung" in result.marks or not run.error(result.failed_rank).exists():
        return None
    try:
        error = pickle.loads(run.error(result.failed_rank).read_bytes())
    except Exception:
        # Its class may need arguments, or a module, that this process does not have.
        return None
    # A KeyboardInterrupt or SystemExit of a rank is none of this process.
    return error if isinstance(error, Exception) else None


def _attach(error: BaseException, **attributes: Any) -> None:
    for name, value in attributes.items():
        try:
            # The rank's own class may have made one of these names read-only.
            setattr(error, name, value)
        except Exception:
            continue

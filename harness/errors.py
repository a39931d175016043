"""The errors that a user can meet; each message is a whole sentence that says what to type instead."""

from __future__ import annotations


class HarnessError(Exception):
    """A mistake that the user can mend: one message, exit status 1, no traceback."""


class ConfigError(HarnessError):
    """Settings that are wrong, or do not go together."""

    @classmethod
    def of(cls, problems: list[str]) -> ConfigError:
        """Return one error that reports all ``problems``, a line each."""
        if len(problems) == 1:
            return cls(problems[0])
        return cls(f"{len(problems)} settings need mending:\n" + "\n".join(f"  - {problem}" for problem in problems))


class BackendUnavailable(HarnessError):
    """The backend asked for cannot run here; the message lists what can."""


class NotComparable(HarnessError):
    """Two runs differ in more than what is compared."""


class Mismatch(HarnessError):
    """The ranks do not train what one process trains; the message names check, step, rank and tensor."""

    def __init__(self, message: str, is_consequence: bool = False) -> None:
        super().__init__(message)
        self.is_consequence = is_consequence


class RunTimeout(HarnessError):
    """Ranks were silent for longer than ``launcher.timeout_s``."""


class RankFailed(HarnessError):
    """A rank ended other than by finishing its task.

    Attributes:
        rank: The rank that fell first.
        pid: Its process id; None where it was never known.
        exit_code: Its exit code; None where a signal ended it.
        signal: The signal's number; None where it exited by itself.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        pid: int | None = None,
        exit_code: int | None = None,
        signal: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.exit_code = exit_code
        self.signal = signal

    @property
    def exit_status(self) -> int:
        """The status that a shell would show: the rank's own code, or 128 + signal; never 0."""
        if self.signal is not None:
            return 128 + self.signal
        return self.exit_code or 1

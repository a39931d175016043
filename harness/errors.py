"""The errors that a user can meet; each message is a whole sentence that says what to type instead."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

HYDRA = {
    "nprocs": "nprocs",
    "backend": "backend",
    "devices": "backend.devices",
    "threads": "threads",
    "method": "launcher",
    "start_method": "launcher.start_method",
    "timeout_s": "launcher.timeout_s",
    "grace_s": "launcher.grace_s",
    "pairs": "compare.pairs",
    "null": "null",
}
"""Setting -> what is typed for it on the line of a Hydra app; ``null`` is how a setting is switched off."""

SPAWN = {
    "nprocs": "nprocs",
    "backend": "backend",
    "devices": "gpus",
    "threads": "threads",
    "start_method": "start_method",
    "timeout_s": "timeout_s",
    "null": "None",
}
"""Setting -> the argument of ``spawn()``; what has none is not there to be set."""

COMMAND = {
    "nprocs": "--nprocs",
    "backend": "--backend",
    "devices": "--gpus",
    "threads": "--threads",
    "timeout_s": "--timeout_s",
    "null": "left out",
}
"""Setting -> the option of the launch command."""

WORDS: Mapping[str, Mapping[str, str]] = {"hydra": HYDRA, "spawn": SPAWN, "command": COMMAND}
"""Door -> its words for settings."""


def unwritable(error: OSError, folder: object) -> str:
    """Return what to say where a sweep cannot be written into ``folder``."""
    sentence = f"{error.filename or folder} cannot be written: {error.strerror or error}."
    return f"{sentence} hydra.sweep.dir=FOLDER chooses another place."


def aside(words: Mapping[str, str], setting: str) -> str:
    """Return a setting's name in brackets, with a space before; nothing where a door has no such setting."""
    return f" ({words[setting]})" if setting in words else ""


class Problem:
    """A sentence on what is wrong, in no door's words yet.

    Attributes:
        template: The sentence, in which ``{timeout_s}`` stands for what a user types for that setting.
        values: Name -> value for the other names in it; inserted as they are, whatever they contain.
    """

    def __init__(self, template: str, **values: Any) -> None:
        self.template = template
        self.values = values

    @property
    def settings(self) -> list[str]:
        """The settings that it speaks of."""
        return [name for _, name, _, _ in Formatter().parse(self.template) if name in HYDRA]

    def in_words(self, words: Mapping[str, str]) -> str:
        """Return the sentence for the users of one door."""
        # A setting for which a door has no word is named by Hydra's, rather than raise KeyError here.
        return self.template.format_map({**HYDRA, **words, **self.values})

    def __str__(self) -> str:
        return self.in_words(HYDRA)


class HarnessError(Exception):
    """A mistake that the user can mend: one message, exit status 1, no traceback."""


# A ValueError too: what whoever calls spawn() expects of a wrong argument.
class WrongSettings(HarnessError, ValueError):
    """Problems with settings, each a :class:`Problem` or a sentence; ``words`` are those in which it is printed."""

    def __init__(self, *problems: Problem | str) -> None:
        # As __init__ takes them: pickle makes an exception anew from its arguments.
        super().__init__(*problems)
        self.problems = problems
        self.words: Mapping[str, str] = HYDRA

    def in_words(self, words: Mapping[str, str]) -> str:
        """Return the message for the users of one door; of several problems each has a line."""
        sentences = [problem.in_words(words) if isinstance(problem, Problem) else str(problem) for problem in self.problems]
        if len(sentences) == 1:
            return sentences[0]
        return f"{len(sentences)} settings need mending:\n" + "\n".join(f"  - {sentence}" for sentence in sentences)

    def __str__(self) -> str:
        return self.in_words(self.words)


class ConfigError(WrongSettings):
    """Settings that are wrong, or do not go together."""


class BackendUnavailable(WrongSettings):
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
        # Not handed to Exception, as its arguments are its text; pickle carries attributes by themselves.
        self.rank = rank
        self.pid = pid
        self.exit_code = exit_code
        self.signal = signal

    @property
    def exit_status(self) -> int:
        """The status that a shell would show: the rank's own code, or 128 + signal; never 0."""
        if self.signal is not None:
            return 128 + self.signal
        # A rank that left early did so with status 0, and the run has failed all the same.
        return self.exit_code or 1

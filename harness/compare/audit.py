"""The audit: which faults the ladder catches, which older rules would have, and how often correct runs are accused. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness import stats

CORRECT = "none"
"""Name of the fault of a run without one."""


@dataclass(frozen=True)
class Trial:
    """One run that was verified with a fault in it, or without.

    Attributes:
        fault: Its name; ``none`` for a correct run.
        expected: The rungs that may fire first; empty for a correct run.
        fired: The first red rung; None where all were green.
        loss_error: Largest relative difference of its losses from those of a correct run, or of one process.
        parameters_close: What ``torch.testing.assert_close`` said of its parameters at the end.
    """

    fault: str
    expected: tuple[str, ...]
    fired: str | None
    loss_error: float
    parameters_close: bool


OLDER_RULES: Mapping[str, Callable[[Trial], bool]] = {
    "loss within 1e-3": lambda trial: trial.loss_error <= 1e-3,
    "loss within 1e-5": lambda trial: trial.loss_error <= 1e-5,
    "assert_close": lambda trial: trial.parameters_close,
}
"""Rules that accept a run; a NaN loss is accepted by none of the first two."""


@dataclass(frozen=True)
class AuditRow:
    """What one fault came to over its trials.

    Attributes:
        fired: The rung that fired first, of most trials; None where none did.
        red: Trials in which any rung was red: caught, or for correct runs false alarms.
        as_expected: Trials in which an expected rung was the first.
        by_older_rules: Rule -> trials that it would have refused.
    """

    fault: str
    expected: tuple[str, ...]
    fired: str | None
    red: int
    as_expected: int
    trials: int
    by_older_rules: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """True where every trial was caught by an expected rung, or no correct run was accused."""
        return self.red == 0 if self.fault == CORRECT else self.as_expected == self.trials

    def sentence(self) -> str:
        """Return the count with the 95 % bound of its proportion (Clopper and Pearson, 1934)."""
        if self.fault == CORRECT:
            most = stats.upper_bound(self.red, self.trials)
            return f"false alarms {self.red} of {self.trials}, below {most:.1%} (95 %)"
        least = 1 - stats.upper_bound(self.trials - self.red, self.trials)
        by = f", first by {self.fired} ({' or '.join(self.expected)} expected)" if self.fired else ""
        return f"caught {self.red} of {self.trials}, above {least:.1%} (95 %){by}"


def audit_table(trials: Iterable[Trial]) -> list[AuditRow]:
    """Return a row for each fault, in the order of their first trials, and last one for the correct runs, if there were any."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.fault, []).append(trial)
    return [_row(groups[fault]) for fault in sorted(groups, key=lambda fault: fault == CORRECT)]


def _row(trials: Sequence[Trial]) -> AuditRow:
    fired = Counter(trial.fired for trial in trials if trial.fired is not None)
    return AuditRow(
        fault=trials[0].fault,
        expected=trials[0].expected,
        fired=fired.most_common(1)[0][0] if fired else None,
        red=fired.total(),
        as_expected=sum(trial.fired in trial.expected for trial in trials),
        trials=len(trials),
        by_older_rules={rule: sum(not accepts(trial) for trial in trials) for rule, accepts in OLDER_RULES.items()},
    )

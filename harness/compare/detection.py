"""The audit: which faults the checks catch, which older rules would have, and how often correct runs are accused. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.compare.performance import stats

CORRECT = "none"
"""Name of the fault of a run without one."""


@dataclass(frozen=True)
class Trial:
    """One run that was verified with a fault in it, or without.

    Attributes:
        fault: Its name; ``none`` for a correct run.
        expected: The checks that may fire first; empty for a correct run.
        fired: The first red check; None where all were green.
        loss_error: Largest relative difference of its losses from those of a correct run, or of one process.
        parameters_close: What ``torch.testing.assert_close`` said of its parameters at the end.
        checks: Check -> ``passed``, ``failed`` or ``not checked``.
    """

    fault: str
    expected: tuple[str, ...]
    fired: str | None
    loss_error: float
    parameters_close: bool
    checks: Mapping[str, str] = field(default_factory=dict)


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
        fired: The check that fired first, of most trials; None where none did.
        red: Trials in which any check was red: caught, or for correct runs false alarms.
        as_expected: Trials in which an expected check was the first.
        by_older_rules: Rule -> trials that it would have refused.
        unchecked: Where it was missed, the checks that could have caught it and were not checked.
    """

    fault: str
    expected: tuple[str, ...]
    fired: str | None
    red: int
    as_expected: int
    trials: int
    by_older_rules: Mapping[str, int] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """True where every trial was caught by an expected check, or no correct run was accused."""
        # A fault that another check finds first is caught, but the check that was made for it may be blind.
        return self.red == 0 if self.fault == CORRECT else self.as_expected == self.trials

    def sentence(self) -> str:
        """Return the count with the 95 % bound of its proportion (Clopper and Pearson, 1934)."""
        if self.fault == CORRECT:
            # 0 of 60 is no proof of never: the bound says how often a correct run might still be accused.
            most = stats.upper_bound(self.red, self.trials)
            return f"false alarms {self.red} of {self.trials}, below {most:.1%} (95 %)"
        # What is caught is at least 1 minus the most that may be missed.
        least = 1 - stats.upper_bound(self.trials - self.red, self.trials)
        by = f", first by {self.fired} ({' or '.join(self.expected)} expected)" if self.fired else ""
        return f"caught {self.red} of {self.trials}, above {least:.1%} (95 %){by}"


def audit_table(trials: Iterable[Trial]) -> list[AuditRow]:
    """Return a row for each fault, in the order of their first trials, and last one for the correct runs, if there were any."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.fault, []).append(trial)
    # False comes before True and the sort is stable: faults stay in their order, and correct runs come last.
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
        unchecked=_unchecked(trials),
        by_older_rules={rule: sum(not accepts(trial) for trial in trials) for rule, accepts in OLDER_RULES.items()},
    )


def _unchecked(trials: Sequence[Trial]) -> tuple[str, ...]:
    # A fault that was missed because its check could not run says nothing against that check.
    missed = [trial for trial in trials if trial.fired is None]
    return tuple(dict.fromkeys(r for t in missed for r in t.expected if t.checks.get(r) == "not checked"))


def trials_of(data: Mapping[str, Any]) -> list[Trial]:
    """Return the trials of an ``audit.json``."""
    return [Trial(**{**trial, "expected": tuple(trial["expected"])}) for trial in data["trials"]]


def audit_lines(data: Mapping[str, Any]) -> list[str]:
    """Return an ``audit.json`` as lines of text: a row for each fault, the false alarms, and why faults were left out."""
    rows = audit_table(trials_of(data))
    cells = [["fault", "expected", "first red", "caught", *OLDER_RULES]]
    # Correct runs have a sentence of their own: what is right in their row would be wrong in every other.
    cells += [_cells(row) for row in rows if row.fault != CORRECT]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines += [
        f"{row.fault} was missed: {', '.join(row.unchecked)} not checked in this training." for row in rows if row.unchecked
    ]
    lines += [f"Correct runs: {row.sentence()}. Refused by older rules: {_older(row)}." for row in rows if row.fault == CORRECT]
    # Named, or the table would pass for all the faults that there are.
    return lines + [f"Left out: {reason}" for reason in data["left_out"].values()]


def _cells(row: AuditRow) -> list[str]:
    older = [f"{row.by_older_rules[rule]} of {row.trials}" for rule in OLDER_RULES]
    return [row.fault, " or ".join(row.expected), row.fired or "none", f"{row.red} of {row.trials}", *older]


def _older(row: AuditRow) -> str:
    return ", ".join(f"{rule} {row.by_older_rules[rule]}" for rule in OLDER_RULES)

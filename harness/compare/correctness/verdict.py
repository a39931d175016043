"""The verdict on one run: the checks, and what to say of them. Pure arithmetic on records."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from harness.compare.correctness.check import Check, Status
from harness.compare.correctness.checks import ALONE, OWN_STATE, run_checks
from harness.compare.correctness.evidence import Evidence

_BEFORE_STEPS = 2
"""The last check that is about what comes before the first step."""
_RANKING: tuple[Status, ...] = ("failed", "passed", "not checked")


@dataclass(frozen=True)
class Verdict:
    """What the checks of one run came to."""

    checks: tuple[Check, ...]

    @property
    def failed(self) -> Check | None:
        """The red check that names the class of fault: of the earliest step, and there the first of CHECKS.

        What goes wrong in one step makes higher checks red in it, and any check in the steps after it.
        """
        return min((check for check in self.checks if check.status == "failed"), key=_when, default=None)

    @property
    def num_passed(self) -> int:
        """Number of green checks."""
        return sum(check.status == "passed" for check in self.checks)

    @property
    def num_checked(self) -> int:
        """Number of checks that were run."""
        return sum(check.status != "not checked" for check in self.checks)

    @property
    def is_proof(self) -> bool:
        """True where nothing is red and the chain to one process has no gap.

        That takes the update (R5) and the gradient, held against the whole batch's (R7 or R8), because the replay of a shard
        (R3) takes the recipe's word for it that its loss is a mean; one rank has no shards. Gradients that travel compressed
        leave a gap, though it is no fault, and so does what forward leaves in a buffer of a rank's own samples alone.
        """
        green = {check.name for check in self.checks if check.status == "passed"}
        whole = not green.isdisjoint(("R7", "R8")) or (self._is_alone and "R3" in green)
        return self.failed is None and "R5" in green and whole and not self._has_own_state

    @property
    def _is_alone(self) -> bool:
        # Told from a check's own words, as those of R11 below: a verdict is its checks and nothing else, and can be made again
        # from them.
        return any(check.name == "R4" and check.status == "not checked" and ALONE in check.detail for check in self.checks)

    @property
    def _has_own_state(self) -> bool:
        return any(check.name == "R11" and check.status == "not checked" and OWN_STATE in check.detail for check in self.checks)

    @property
    def label(self) -> str:
        """The verdict in a table's cell."""
        if self.failed is not None:
            return f"FAILED {self.failed.name}"
        if self.num_checked == 0:
            return "not checked"
        count = f"{self.num_passed} of {self.num_checked} checks"
        return f"equal to 1 process: {count}" if self.is_proof else f"not proven: {count}"

    def sentences(self) -> list[str]:
        """Return what to say of a red verdict: the first red check in full, then what else is red; nothing of a green one."""
        first = self.failed
        if first is None:
            return []
        others = [f"{check.name} ({check.title})" for check in self.checks if check.status == "failed" and check is not first]
        # The others by name alone: the usual causes of a consequence would lead astray.
        return [first.sentence(), *([f"Also red, and probably for the same reason: {', '.join(others)}."] if others else [])]

    def joined_by(self, *others: Check) -> Verdict:
        """Return this verdict with checks that came from elsewhere (R10, R12, R13), in the order of CHECKS.

        Of two checks of one name the red one counts, else the green one; two green ones say both what they saw.
        """
        best: dict[str, Check] = {}
        for check in (*self.checks, *others):
            known = best.setdefault(check.name, check)
            if _RANKING.index(check.status) < _RANKING.index(known.status):
                best[check.name] = check
            elif known is not check and check.status == known.status == "passed":
                best[check.name] = dataclasses.replace(known, detail=f"{known.detail}; {check.detail}")
        # By number: as text R10 would come before R2.
        return Verdict(tuple(sorted(best.values(), key=lambda check: int(check.name[1:]))))


def _when(check: Check) -> tuple[float, int]:
    """Return what orders red checks by cause: before the first step, the step, after the last; then place in CHECKS."""
    number, where = int(check.name[1:]), check.where or {}
    if number <= _BEFORE_STEPS or where.get("stage") == "evidence":
        return -1, number
    return float(where.get("step", math.inf)), number


def judge(evidence: Evidence) -> Verdict:
    """Return what the evidence of one verification comes to. It raises nothing: evidence that cannot be read is red."""
    return Verdict(run_checks(evidence))


__all__ = ["Check", "Status", "Verdict", "judge"]

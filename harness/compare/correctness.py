"""The verdict on one run: the rungs of the ladder, and what to say of them. Pure arithmetic on records."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from harness.compare.evidence import Evidence
from harness.compare.ladder import ALONE, OWN_STATE, climb
from harness.compare.rung import Rung, Status

_BEFORE_STEPS = 2
"""The last rung that is about what comes before the first step."""
_RANKING: tuple[Status, ...] = ("failed", "passed", "not checked")


@dataclass(frozen=True)
class Verdict:
    """What the rungs of one run came to."""

    rungs: tuple[Rung, ...]

    @property
    def failed(self) -> Rung | None:
        """The red rung that names the class of fault: of the earliest step, and there the first of the ladder.

        What goes wrong in one step makes higher rungs red in it, and any rung in the steps after it.
        """
        return min((rung for rung in self.rungs if rung.status == "failed"), key=_when, default=None)

    @property
    def num_passed(self) -> int:
        """Number of green rungs."""
        return sum(rung.status == "passed" for rung in self.rungs)

    @property
    def num_checked(self) -> int:
        """Number of rungs that were run."""
        return sum(rung.status != "not checked" for rung in self.rungs)

    @property
    def is_proof(self) -> bool:
        """True where nothing is red and the chain to one process has no gap.

        That takes the update (R5) and the gradient, held against the whole batch's (R7 or R8), because the replay of a shard
        (R3) takes the recipe's word for it that its loss is a mean; one rank has no shards. Gradients that travel compressed
        leave a gap, though it is no fault, and so does what forward leaves in a buffer of a rank's own samples alone.
        """
        green = {rung.name for rung in self.rungs if rung.status == "passed"}
        whole = not green.isdisjoint(("R7", "R8")) or (self._is_alone and "R3" in green)
        return self.failed is None and "R5" in green and whole and not self._has_own_state

    @property
    def _is_alone(self) -> bool:
        return any(rung.name == "R4" and rung.status == "not checked" and ALONE in rung.detail for rung in self.rungs)

    @property
    def _has_own_state(self) -> bool:
        return any(rung.name == "R11" and rung.status == "not checked" and OWN_STATE in rung.detail for rung in self.rungs)

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
        """Return what to say of a red verdict: the first red rung in full, then what else is red; nothing of a green one."""
        first = self.failed
        if first is None:
            return []
        others = [f"{rung.name} ({rung.title})" for rung in self.rungs if rung.status == "failed" and rung is not first]
        return [first.sentence(), *([f"Also red, and probably for the same reason: {', '.join(others)}."] if others else [])]

    def joined_by(self, *others: Rung) -> Verdict:
        """Return this verdict with rungs that came from elsewhere (R10, R12, R13), in the ladder's order.

        Of two rungs of one name the red one counts, else the green one; two green ones say both what they saw.
        """
        best: dict[str, Rung] = {}
        for rung in (*self.rungs, *others):
            known = best.setdefault(rung.name, rung)
            if _RANKING.index(rung.status) < _RANKING.index(known.status):
                best[rung.name] = rung
            elif known is not rung and rung.status == known.status == "passed":
                best[rung.name] = dataclasses.replace(known, detail=f"{known.detail}; {rung.detail}")
        return Verdict(tuple(sorted(best.values(), key=lambda rung: int(rung.name[1:]))))


def _when(rung: Rung) -> tuple[float, int]:
    """Return what orders red rungs by cause: before the first step, the step, after the last; then place in the ladder."""
    number, where = int(rung.name[1:]), rung.where or {}
    if number <= _BEFORE_STEPS or where.get("stage") == "evidence":
        return -1, number
    return float(where.get("step", math.inf)), number


def judge(evidence: Evidence) -> Verdict:
    """Return what the evidence of one verification comes to. It raises nothing: evidence that cannot be read is red."""
    return Verdict(climb(evidence))


__all__ = ["Rung", "Status", "Verdict", "judge"]

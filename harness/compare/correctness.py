"""The ladder of checks: from what ranks and reference recorded to a verdict. Pure arithmetic on records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "not checked"]


@dataclass(frozen=True)
class Rung:
    """One check.

    Attributes:
        name: ``R0`` to ``R14``.
        title: What it is about, in a word or two.
        status: ``not checked`` has its reason in ``detail``.
        quantity: The worst value that was seen; None where bits or whole sets were compared.
        threshold: What it may be at most.
        origin: Of the threshold: ``bits``, ``theorem``, ``measured`` or ``declared``.
        detail: What was compared, or why not; for a red rung, what usually causes it.
        where: For a red rung, step, rank, stage and tensor, as far as they are known.
    """

    name: str
    title: str
    status: Status
    quantity: float | None = None
    threshold: float | None = None
    origin: str = "bits"
    detail: str = ""
    where: Mapping[str, str | int] | None = None


@dataclass(frozen=True)
class Verdict:
    """What the rungs of one run came to."""

    rungs: tuple[Rung, ...]

    @property
    def failed(self) -> Rung | None:
        """The first red rung, which names the class of fault."""
        return next((rung for rung in self.rungs if rung.status == "failed"), None)

    @property
    def num_passed(self) -> int:
        """Number of green rungs."""
        return sum(rung.status == "passed" for rung in self.rungs)

    @property
    def num_checked(self) -> int:
        """Number of rungs that were run."""
        return sum(rung.status != "not checked" for rung in self.rungs)

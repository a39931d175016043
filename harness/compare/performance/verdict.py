"""Which of two ways of running is faster, and how sure that is: pure functions from numbers of launches to a verdict.

The unit is one launch: its steps become one number, pairs of launches become one ratio. Times are compared with the
run-delay subtracted (how long the kernel let a runnable rank wait, second field of ``/proc/self/schedstat``), and
beside that as measured; a claim that the measured times contradict is not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.compare.performance import stats
from harness.compare.performance.claim import Claim, agreed, pair_evidence, pairs_needed
from harness.compare.performance.launches import Launch, Quantity, counted, require_comparable
from harness.compare.performance.words import as_told, headline, remarks, times, within

# Start-up has the wider one: imports, disks and the scheduler make it vary more than steps do.
MARGINS: Mapping[Quantity, float] = {"throughput": 0.10, "start": 0.20}
"""The smallest difference that matters, unless told otherwise."""


@dataclass(frozen=True)
class PerformanceVerdict:
    """What can be said about a candidate against a baseline.

    Attributes:
        verdict: ``equivalent`` (the 90 % interval of the ratio lies within the margin; this comes first, so a
            difference too small to matter is never called faster), ``faster`` or ``slower`` (its 95 % interval leaves
            out 1), or ``inconclusive``. There is no "no difference".
        quantity: ``throughput`` or ``start``.
        margin: The smallest difference that matters, as a share.
        adjusted: Time of the candidate over time of the baseline, with run-delay subtracted; None without a pair.
        raw: The same as measured.
        pairs: Pairs that the ratio rests on.
        contaminated: Numbers of the pairs that were left out as disturbed, with the reasons.
        untold: The same for those of which nobody can tell whether they were.
        needed_pairs: How many pairs in all would settle the margin at the width seen; None where nothing can be
            forecast. A stop rule may look at this, as it does not depend on the effect; what that costs is said at
            :func:`stats.pairs_to_settle`.
        sentences: The verdict as text, then what the reader must know beside it.
    """

    verdict: Claim
    quantity: Quantity
    margin: float
    adjusted: stats.PairedRatio | None
    raw: stats.PairedRatio | None
    pairs: int
    contaminated: Mapping[int, tuple[str, ...]]
    untold: Mapping[int, tuple[str, ...]]
    needed_pairs: int | None
    sentences: tuple[str, ...]

    @property
    def left_out(self) -> int:
        """How many pairs were left out."""
        return len(self.contaminated) + len(self.untold)

    @property
    def ratio(self) -> float | None:
        """Time of the candidate over time of the baseline; below 1, the candidate is faster."""
        return self.adjusted.ratio if self.adjusted else None

    @property
    def interval(self) -> stats.Interval | None:
        """The 95 % interval of the ratio."""
        return self.adjusted.interval if self.adjusted else None

    @property
    def label(self) -> str:
        """The verdict in the words of a table's cell, such as ``1.82x faster``."""
        if self.verdict == "equivalent":
            return within(self.margin)
        # No pair could be looked at, which is something else than pairs that came to no claim.
        if self.untold and self.left_out == len(self.untold) and not self.pairs:
            return "cannot tell"
        if self.verdict == "inconclusive" or self.adjusted is None:
            return "inconclusive"
        # Told as a factor above 1 either way: "0.55x slower" would be read wrong.
        return f"{times(as_told(self.adjusted.ratio, self.verdict))}x {self.verdict}"


def compare(
    baseline: Sequence[Launch],
    candidate: Sequence[Launch],
    quantity: Quantity = "throughput",
    margin: float | None = None,
    varied: Iterable[str] = (),
) -> PerformanceVerdict:
    """Return what the launches of two arms say about each other; pilots are left aside.

    Args:
        baseline: Its launches, in any order; they are paired with the candidate's by ``pair``.
        candidate: Its launches.
        quantity: What is compared.
        margin: The smallest difference that matters, as a share; by default that of :data:`MARGINS`.
        varied: Names of :data:`CONDITIONS` that may differ because they are what is compared.

    Raises:
        NotComparable: An arm has no launch, or the conditions differ.
    """
    arms = [counted(baseline, "the baseline"), counted(candidate, "the candidate")]
    require_comparable([*arms[0].values(), *arms[1].values()], varied)
    evidence = pair_evidence(arms, quantity, MARGINS[quantity] if margin is None else margin)
    # The claim is that of adjusted times; raw ones are a witness that can only object.
    verdict, needed = agreed(evidence.logs, evidence.raw_logs, evidence.margin), pairs_needed(evidence)
    return PerformanceVerdict(
        verdict=verdict,
        quantity=quantity,
        margin=evidence.margin,
        adjusted=stats.paired_ratio(evidence.logs) if evidence.logs else None,
        raw=stats.paired_ratio(evidence.raw_logs) if evidence.raw_logs else None,
        pairs=len(evidence.clean),
        contaminated=evidence.dirty,
        untold=evidence.untold,
        needed_pairs=needed,
        sentences=(headline(verdict, evidence, needed), *remarks(evidence)),
    )

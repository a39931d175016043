"""What can be wrong in numbers (R7 to R9): too far from the whole batch's gradient, or from what should be reported.

Each function yields mismatches in causal order, none where all is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.compare.correctness.agreement import backwards, by_scale, finite, mean, per_rank, some, steps_of
from harness.compare.correctness.check import Incomplete, Mismatch
from harness.compare.correctness.evidence import Evidence, Mathematics, StepEvidence

MOST_EXCESS = 4.0
"""Largest excess ratio X of R3 and R8; correct runs reached 1.2 over 280 steps (measured)."""

MOST_LOSS_ERROR = 32.0
"""Largest relative error of a loss in units of round-off; correct runs reached 1.3e-7 in float32, 2.2 units (measured)."""

MOST_IN_FLOAT64 = 1e-11
"""Largest relative error of R7, of gradients (within its ratios) and loss; correct runs reached 1.8e-15 (measured)."""

MOST_IN_REPORT = 1e-12
"""Largest relative error of sums in float64 that were added in another order (R9, declared)."""

ROUND_OFF = {"float32": 2.0**-24, "float64": 2.0**-53, "bfloat16": 2.0**-8}
"""Unit round-off u = 2^-p of p significant bits."""


# --- R7 and R8: mathematics ------------------------------------------------------------------------------------------


def in_mathematics(
    evidence: Evidence, found: Sequence[Mathematics], most: float, most_loss: float, said: str
) -> Iterator[Mismatch]:
    """R7, R8: losses and gradients too far from the whole batch's.

    Args:
        most: Of a tensor's ratio.
        most_loss: Of the loss's error, in units of round-off.
        said: How a ratio is told, with a place for it.
    """
    steps = steps_of(evidence)
    # The names are those of what was reduced, not of what was compared, so that a tensor which was left out shows.
    trained, numbers = steps[0]["reduced"][0], {step["step"] for step in steps}
    for each in some(found, "any comparison with the whole batch"):
        error = each["loss_error"]
        if each["step"] not in numbers:
            raise Incomplete(f"step {each['step']} was compared with the whole batch, and is none of those that were taken")
        # "not <=", here and below, and not ">": NaN is on neither side of a bound, and must come out as wrong.
        if not error <= most_loss:
            seen = f"the loss is {error:.2g} units of round-off from the whole batch's, at most {most_loss:.3g}"
            yield Mismatch(seen, "loss", each["step"], quantity=error, threshold=most_loss)
        for name in backwards(trained, each["ratios"]):
            ratio = each["ratios"].get(name)
            if name not in trained or ratio is None:
                seen = "this tensor was not compared" if ratio is None else "this tensor is not one that is trained"
                yield Mismatch(seen, "gradient", each["step"], tensor=name)
            elif not ratio <= most:
                yield Mismatch(said.format(ratio), "gradient", each["step"], tensor=name, quantity=ratio)


# --- R9: reports -----------------------------------------------------------------------------------------------------


def in_report(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R9: sums and counts of losses that are not the reference's, and a reported mean that is not theirs."""
    sums = step["loss"]
    ranks = per_rank(evidence, sums["ranks"], "sums of losses")
    references = per_rank(evidence, sums["reference"], "the reference's sums of losses")
    for rank, (mine, other) in enumerate(zip(ranks, references, strict=True)):
        wrong = _in_sums(evidence, "losses", mine, other)
        if wrong:
            seen, error, most = wrong
            yield Mismatch(seen, "sum of losses", step["step"], rank, quantity=error, threshold=most)
    # Last, because sums that are wrong make the mean wrong as well, and they name the rank.
    error = reported_error(step)
    if not error <= MOST_IN_REPORT:
        seen = f"loss {sums['reported']!r} is reported where the mean over all ranks is {mean(ranks)!r}"
        yield Mismatch(f"{seen}{_error(error, MOST_IN_REPORT)}", "reported loss", step["step"], quantity=error)


def reported_error(step: StepEvidence) -> float:
    """Return the error of the reported loss by the mean of the sums' absolute values, with which rounding grows."""
    sums = step["loss"]["ranks"]
    return by_scale(abs(step["loss"]["reported"] - mean(sums)), mean((abs(total), count) for total, count in sums))


def in_evaluation(evidence: Evidence) -> Iterator[Mismatch]:
    """R9: metrics whose sum or count is not the reference's, where that has one to be compared with."""
    metrics, references = evidence["evaluation"] or {}, evidence["reference_evaluation"] or {}
    random = random_metrics(evidence)
    for name in dict.fromkeys((*references, *metrics)):
        # Nobody comes to these again; report() names them as not checked, so that they do not drop out in silence.
        if name in random:
            continue
        if name not in metrics or name not in references:
            who = "reported" if name not in metrics else "known to the reference"
            yield Mismatch(f"it is not {who}", "evaluation", extra={"metric": name})
            continue
        wrong = _in_sums(evidence, "items", metrics[name], references[name])
        if wrong:
            seen, error, most = wrong
            yield Mismatch(seen, "evaluation", quantity=error, threshold=most, extra={"metric": name})


def random_metrics(evidence: Evidence) -> list[str]:
    """Return the metrics that one process, with other random draws, does not come to again."""
    references, again = evidence["reference_evaluation"] or {}, evidence.get("evaluated_again") or []
    others = {name: [one[name] for one in again if name in one] for name in references}
    # By the same rule as the ranks' own metrics: what is let off here is exactly what would be accused there.
    return [name for name, pairs in others.items() if any(_in_sums(evidence, "items", references[name], p) for p in pairs)]


def _in_sums(
    evidence: Evidence, what: str, mine: Sequence[float], other: Sequence[float]
) -> tuple[str, float | None, float | None] | None:
    """Return what is wrong with a (sum, count), with error and threshold; None where nothing is."""
    (total, count), (total_there, count_there) = mine, other
    # Counts first: a sum over other items need not be near, and the count says what is wrong with it.
    if not (finite(count) and count >= 0 and _same_count(count, count_there)):
        return f"{count} {what} are counted where the reference counts {count_there}", None, None
    # With deterministic kernels both sides add the same bits, in float64 and perhaps in another order; without them, the losses
    # themselves differ by rounding of the run's own precision.
    most = MOST_IN_REPORT if evidence["deterministic"] else MOST_LOSS_ERROR * ROUND_OFF[evidence["precision"]]
    # One round-off of float64 for each item is allowed, so that sums which cancel are not accused.
    floor = count * ROUND_OFF["float64"] / most
    error = by_scale(abs(total - total_there), max(abs(total), abs(total_there), floor))
    if error <= most:
        return None
    return f"{what} add up to {total!r} where the reference has {total_there!r}{_error(error, most)}", error, most


def _same_count(mine: float, other: float) -> bool:
    """Return whether two counts are the same: weights may count, whose sums are rounded."""
    # Whole counts are exact in float64 up to 2^53, so that one sample too many is found however large the data set is.
    whole = float(mine).is_integer() and float(other).is_integer()
    return mine == other if whole else by_scale(abs(mine - other), max(abs(mine), abs(other))) <= MOST_IN_REPORT


def _error(error: float, most: float) -> str:
    return f": relative error {error:.2g}, at most {most:.2g}"

"""The statistics of comparing runs: pure functions of numbers, in the standard library alone.

The parent process imports this, and must not pay for numpy or scipy when it starts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Literal

from harness.compare.performance.distributions import beta_quantile, signed_rank_depth, student_t_quantile

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation, 1 / Phi^-1(3/4)."""

SIGNED_RANK_FROM = 6
"""Fewest pairs for which the signed-rank interval reaches 95 %: with 5, the widest one has 1 - 2/32 = 94 %."""

DRIFT_LIMIT = 0.10
"""A run whose first and last quarter differ by more than this share is not steady."""

MOST_PAIRS = 10_000
"""Forecasts beyond this many pairs are not given: nobody would run them."""


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval; ``level`` is the nominal coverage, such as 0.95."""

    low: float
    high: float
    level: float

    def contains(self, value: float) -> bool:
        """Return whether ``value`` lies in the closed interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class PairedRatio:
    """The ratio of two paired quantities.

    Attributes:
        ratio: The second over the first; for times, above 1 means that the second took longer.
        interval: Of the ratio; None with one pair, which says nothing about how far ratios vary.
        pairs: How many pairs it rests on.
        method: ``t`` (mean of the log ratios), ``signed-rank`` (Hodges-Lehmann), or ``single``.
    """

    ratio: float
    interval: Interval | None
    pairs: int
    method: Literal["t", "signed-rank", "single"]


@dataclass(frozen=True)
class Steadiness:
    """Whether a series of step times has settled.

    Attributes:
        first: Median of the first quarter.
        last: Median of the last quarter.
        steady: True where they differ by at most :data:`DRIFT_LIMIT`.
    """

    first: float
    last: float
    steady: bool


# Location and spread


def median(values: Sequence[float]) -> float:
    """Return the median; ValueError where there are no values."""
    if not values:
        raise ValueError("the median of no values is not defined")
    return statistics.median(values)


def quantile(values: Sequence[float], p: float) -> float:
    """Return the ``p`` quantile, interpolated linearly between order statistics (type 7 of Hyndman and Fan, 1996)."""
    if not values or not 0 <= p <= 1:
        raise ValueError(f"quantile {p} of {len(values)} values is not defined")
    ordered = sorted(values)
    position = p * (len(ordered) - 1)
    below = math.floor(position)
    # At p = 1 there is no value above.
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def mad(values: Sequence[float]) -> float:
    """Return the median absolute deviation from the median, unscaled."""
    centre = median(values)
    return median([abs(value - centre) for value in values])


def spread(values: Sequence[float]) -> float:
    """Return the number to quote after +-: 1.4826 times the median absolute deviation.

    For normal values it estimates their standard deviation (two thirds of single values lie within it), and a few slow
    steps do not move it. It is the spread of single values, never the uncertainty of their median.
    """
    return NORMAL_MAD * mad(values)


def steadiness(values: Sequence[float]) -> Steadiness | None:
    """Return whether the last quarter is like the first; None with fewer than 4 values, where nothing can be said."""
    quarter = len(values) // 4
    if quarter == 0:
        return None
    # Medians, so that one slow step at either end is no drift.
    first, last = median(values[:quarter]), median(values[-quarter:])
    # 1e-12: a difference of exactly 10 % still passes, whichever way the division rounds.
    return Steadiness(first, last, max(first, last) <= min(first, last) * (1 + DRIFT_LIMIT + 1e-12))


# Intervals for the location of differences


def walsh_averages(values: Sequence[float]) -> list[float]:
    """Return the n(n+1)/2 averages of all pairs, each value also with itself, in increasing order."""
    return sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of the Walsh averages (Hodges and Lehmann, 1963): a centre that outliers hardly move."""
    return median(walsh_averages(values))


def signed_rank_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the interval for the centre that inverts the exact Wilcoxon signed-rank test (Tukey, 1949).

    It runs from the k-th smallest to the k-th largest Walsh average, closed. It assumes differences that are symmetric
    about the centre. Ties and zeros need no correction: they make the closed interval cover more, never less.

    Raises:
        ValueError: There are too few values for ``level``: 95 % needs 6, 90 % needs 5.
    """
    depth = signed_rank_depth(len(values), level)
    if depth == 0:
        raise ValueError(f"{len(values)} values are too few for an exact signed-rank interval of {level:.0%}")
    averages = walsh_averages(values)
    return Interval(averages[depth - 1], averages[-depth], level)


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the interval of Student's t for the mean (Student, 1908); ValueError for fewer than 2 values."""
    if len(values) < 2:
        raise ValueError("an interval needs at least 2 values")
    half = student_t_quantile((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    centre = statistics.fmean(values)
    return Interval(centre - half, centre + half, level)


def location_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the interval for the centre of ``values``: by t below 6 values, by exact signed ranks from 6."""
    by = signed_rank_interval if len(values) >= SIGNED_RANK_FROM else t_interval
    return by(values, level)


# Paired ratios


def log_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return ln(second / first) of each pair.

    Raises:
        ValueError: The lengths differ, or a value is not positive and finite.
    """
    # Chained, so that NaN is refused as well: it is not above 0.
    if any(not 0 < value < math.inf for value in (*first, *second)):
        raise ValueError("a ratio needs positive, finite values")
    return [math.log(b / a) for a, b in zip(first, second, strict=True)]


def paired_ratio(logs: Sequence[float], level: float = 0.95) -> PairedRatio:
    """Return the ratio that log ratios speak for, with its interval.

    Below 6 pairs exp(mean) with the interval by t; from 6 exp(Hodges-Lehmann) with the exact signed-rank interval. One
    pair has no interval.
    """
    if len(logs) == 1:
        return PairedRatio(math.exp(logs[0]), None, 1, "single")
    inner = location_interval(logs, level)
    interval = Interval(math.exp(inner.low), math.exp(inner.high), level)
    # Centre and interval by one method, so that the one always lies in the other.
    if len(logs) < SIGNED_RANK_FROM:
        return PairedRatio(math.exp(statistics.fmean(logs)), interval, len(logs), "t")
    return PairedRatio(math.exp(hodges_lehmann(logs)), interval, len(logs), "signed-rank")


def factor(logs: Sequence[float], level: float = 0.95) -> PairedRatio:
    """Return the ratio that log ratios speak for, centred so that the centres of ratios which multiply pair by pair do too.

    It is exp(mean) at any number of pairs; Hodges-Lehmann centres do not add. The interval is that of :func:`paired_ratio`,
    made wider where it would leave the centre out, as one far pair moves the mean and hardly the signed ranks.
    """
    found, centre = paired_ratio(logs, level), math.exp(statistics.fmean(logs))
    if found.interval is None:
        return found
    wide = Interval(min(found.interval.low, centre), max(found.interval.high, centre), level)
    return PairedRatio(centre, wide, found.pairs, found.method)


def equivalent(logs: Sequence[float], margin: float, level: float = 0.95) -> bool:
    """Return whether the ratio is shown to lie in [1/(1+margin), 1+margin]: two one-sided tests (Schuirmann, 1987).

    Both tests at 1 - ``level`` reject exactly where the interval of level 2 ``level`` - 1 (90 % for 95 %) lies inside.
    """
    if len(logs) < 2:
        return False
    # The margin is symmetric in logarithms: 1 / (1 + m) is as far from 1 as 1 + m.
    bound = math.log1p(margin)
    interval = location_interval(logs, 2 * level - 1)
    return -bound < interval.low and interval.high < bound


def effective_sd(logs: Sequence[float], level: float = 0.95) -> float:
    """Return the standard deviation of log ratios that the widths of their intervals correspond to.

    Below 6 pairs it is the standard deviation itself; from 6 on, outliers count as little as they do in the interval.
    """
    # From both widths, because their sum is what pairs_to_settle asks for.
    wide, narrow = (location_interval(logs, at) for at in (level, 2 * level - 1))
    return (wide.high - wide.low + narrow.high - narrow.low) / 2 / _settling_width(len(logs), level)


def _settling_width(pairs: int, level: float) -> float:
    """Return the half-widths of the ``level`` and the TOST interval, added, in standard deviations of one log ratio."""
    # By t from 6 pairs on as well: signed ranks have no width before the values are there, and a forecast needs no more.
    quantiles = student_t_quantile((1 + level) / 2, pairs - 1) + student_t_quantile(level, pairs - 1)
    return quantiles / math.sqrt(pairs)


def pairs_to_settle(sd: float, margin: float, level: float = 0.95) -> int | None:
    """Return how many pairs in all would settle a margin, whatever the true ratio; None beyond :data:`MOST_PAIRS`.

    A log ratio d is left undecided where its ``level`` interval holds 0 (|d| <= h) and its TOST interval reaches out
    of the margin (|d| >= ln(1 + margin) - h'). From the number returned on, h + h' <= ln(1 + margin), and no d does
    both. Only the width enters, never the effect, so a stop rule may look at it. One that looks after each pair stops
    where the width happens to be small: its intervals cover 92 to 95 % (benchmarks/simulate_verdicts.py).

    Assumes normal log ratios whose standard deviation stays ``sd``. From few pairs ``sd`` is itself uncertain, from 4
    by a factor of 0.6 to 3.7 (95 %): the number is a forecast and not a promise.
    """
    if margin <= 0:
        raise ValueError(f"a margin of {margin} cannot be settled: it must be above 0")
    low, high = 2, MOST_PAIRS
    # The width only falls with the number of pairs: the largest number tells whether any will do, and halving finds the first.
    if sd * _settling_width(high, level) > math.log1p(margin):
        return None
    while low < high:
        middle = (low + high) // 2
        if sd * _settling_width(middle, level) <= math.log1p(margin):
            high = middle
        else:
            low = middle + 1
    return low


# Proportions


def upper_bound(k: int, n: int, level: float = 0.95) -> float:
    """Return the exact one-sided upper bound of a proportion, for sentences such as "false alarms 0 of 60, below 5 %".

    For k = 0 it is 1 - (1 - level)^(1/n), which the rule of three rounds to 3/n (Hanley and Lippman-Hand, 1983).
    """
    _require_counts(k, n)
    if k == n:
        return 1.0
    # expm1 keeps the digits that 1 - (1 - level) ** (1 / n) would lose for a large n.
    if k == 0:
        return -math.expm1(math.log(1 - level) / n)
    # Clopper and Pearson (1934): the bound is a quantile of Beta(k + 1, n - k).
    return beta_quantile(level, k + 1, n - k)


def _require_counts(k: int, n: int) -> None:
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"{k} of {n} is not a proportion")

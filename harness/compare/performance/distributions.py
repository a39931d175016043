"""Quantiles of Student's t and of signed ranks, in the standard library alone.

Quantiles come from the regularised incomplete beta function, the signed-rank distribution from exact counting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), to about 1e-13.

    By the continued fraction DLMF 8.17.22; the symmetry I_x(a, b) = 1 - I_{1-x}(b, a) keeps it where it converges fast.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # Below this the fraction converges rapidly (DLMF 8.17.v); above it the mirrored one does.
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(1 - x, b, a)
    # In logarithms: the gamma function itself is too large for a float from 171.7 on.
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return 1 / (1 + d1 / (1 + d2 / (1 + ...))) of DLMF 8.17.22, by the modified Lentz method (DLMF 3.10.iii)."""
    value, c, d = 1.0, 1.0, 0.0
    # Far more terms than it takes; a bound nevertheless, so that an argument that is NaN comes to an end.
    for i in range(10_000):
        m = i // 2
        if i == 0:
            term = 1.0
        elif i % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + term * d)
        c = _away_from_zero(1 + term / c)
        value *= c * d
        if i > 0 and abs(c * d - 1) < 1e-15:
            break
    # Lentz's method must not begin with 0: it began with 1, which is taken off again.
    return value - 1


def _away_from_zero(value: float) -> float:
    # Lentz's own remedy: a denominator of 0 becomes a tiny number, and the next term makes up for it.
    return value if abs(value) > 1e-300 else 1e-300


def _bisect(increasing: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return where ``increasing`` reaches ``target``, to the last bit of a float."""
    middle = (low + high) / 2
    # It ends where no float lies between, so that there is no tolerance to choose.
    while low < middle < high:
        if increasing(middle) < target:
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return middle


@lru_cache(maxsize=4096)
def beta_quantile(p: float, a: float, b: float) -> float:
    """Return x in [0, 1] with I_x(a, b) = ``p``."""
    return _bisect(lambda x: beta_cdf(x, a, b), p, 0.0, 1.0)


@lru_cache(maxsize=4096)
def student_t_quantile(p: float, df: float) -> float:
    """Return t with P(T <= t) = ``p``; ValueError outside 0 < p < 1 or for ``df`` <= 0."""
    if not 0 < p < 1 or df <= 0:
        raise ValueError(f"the {p} quantile of Student's t with {df} degrees of freedom is not defined")
    # By symmetry, because the beta distribution below knows only how large T is, not its sign.
    if p < 0.5:
        return -student_t_quantile(1 - p, df)
    # df / (df + T^2) is distributed as Beta(df / 2, 1 / 2).
    x = beta_quantile(2 * (1 - p), df / 2, 0.5)
    return math.sqrt(df * (1 - x) / x)


@lru_cache(maxsize=256)
def signed_rank_counts(n: int) -> tuple[int, ...]:
    """Return, for w = 0 ... n(n+1)/2, how many of the 2^n sign patterns give the signed-rank sum w.

    By dynamic programming over the ranks: rank r is either in the sum or not.
    """
    counts = [1]
    for rank in range(1, n + 1):
        longer = counts + [0] * rank
        for w, count in enumerate(counts):
            longer[w + rank] += count
        counts = longer
    return tuple(counts)


@lru_cache(maxsize=1024)
def signed_rank_depth(n: int, level: float) -> int:
    """Return the largest k with P(W <= k - 1) <= (1 - level) / 2; 0 where even k = 1 is too likely."""
    # Counts are added as whole numbers, so that no rounding of many small probabilities adds up.
    allowed = (1 - level) / 2 * 2**n
    return sum(cumulative <= allowed for cumulative in accumulate(signed_rank_counts(n)))

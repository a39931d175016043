"""harness.compare.performance.stats against published tables and worked examples."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from harness.compare.performance import distributions, stats

# Hollander and Wolfe, Nonparametric Statistical Methods, table 3.1: depression scores before and after a treatment.
BEFORE = (1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30)
AFTER = (0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29)
CHANGE = [after - before for before, after in zip(BEFORE, AFTER, strict=True)]

# Darwin's maize, crossed minus self-fertilised, in eighths of an inch (Fisher, The Design of Experiments, section 17).
MAIZE = (49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48)


def limits(interval: stats.Interval) -> tuple[float, float]:
    """Return both ends, for pytest.approx."""
    return interval.low, interval.high


def test_quantiles_interpolate_between_order_statistics() -> None:
    assert stats.median([3, 1, 2]) == 2
    assert stats.quantile([1, 2, 3, 4], 0.25) == pytest.approx(1.75)  # numpy's and R's default
    assert stats.quantile([5, 1], 1) == 5
    assert stats.quantile([7], 0.3) == 7


@pytest.mark.parametrize("call", [lambda: stats.median([]), lambda: stats.quantile([], 0.5), lambda: stats.spread([])])
def test_no_values_have_no_median(call: object) -> None:
    with pytest.raises(ValueError, match="not defined"):
        call()  # type: ignore[operator]


def test_spread_is_the_scaled_median_absolute_deviation() -> None:
    values = [1, 1, 2, 2, 4, 6, 9]  # the textbook example: median 2, deviations 1 1 0 0 2 4 7, their median 1
    assert stats.mad(values) == 1
    assert stats.spread(values) == pytest.approx(1.4826)


def test_spread_estimates_the_normal_standard_deviation_and_ignores_an_outlier() -> None:
    values = [statistics.NormalDist(10, 2).inv_cdf((i + 0.5) / 999) for i in range(999)]
    assert stats.spread(values) == pytest.approx(2, rel=0.01)
    assert stats.spread([*values, 1e9]) == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(("last", "steady"), [(1.0, True), (1.10, True), (1.11, False), (1 / 1.10, True), (1 / 1.11, False)])
def test_a_run_is_steady_up_to_10_percent_in_either_direction(last: float, steady: bool) -> None:
    found = stats.steadiness([1.0] * 5 + [50.0] * 10 + [last] * 5)
    assert found == stats.Steadiness(1.0, last, steady)


def test_steadiness_of_fewer_than_4_steps_is_unknown() -> None:
    assert stats.steadiness([1.0, 2.0, 3.0]) is None


@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 5, 2.571),
        (0.975, 10, 2.228),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
        (0.95, 1, 6.314),
        (0.95, 2, 2.920),
        (0.95, 9, 1.833),
        (0.995, 4, 4.604),
        (0.8, 3, 0.978),
        (0.025, 4, -2.776),
        (0.5, 7, 0.0),
    ],
)
def test_t_quantiles_are_those_of_the_printed_tables(p: float, df: float, expected: float) -> None:
    assert distributions.student_t_quantile(p, df) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("t", [-3.0, -0.2, 0.0, 1.0, 12.0])
def test_t_quantiles_agree_with_the_closed_forms_for_1_and_2_degrees_of_freedom(t: float) -> None:
    assert distributions.student_t_quantile(0.5 + math.atan(t) / math.pi, 1) == pytest.approx(t, abs=1e-9)
    assert distributions.student_t_quantile(0.5 + t / (2 * math.sqrt(2 + t * t)), 2) == pytest.approx(t, abs=1e-9)


@pytest.mark.parametrize(("p", "df"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_t_quantile_refuses_what_is_not_defined(p: float, df: float) -> None:
    with pytest.raises(ValueError, match="not defined"):
        distributions.student_t_quantile(p, df)


def test_beta_cdf_agrees_with_binomial_sums() -> None:
    for n, k, x in ((5, 2, 0.3), (40, 30, 0.7), (12, 1, 0.01), (9, 9, 0.9)):
        tail = sum(math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(k, n + 1))
        assert distributions.beta_cdf(x, k, n - k + 1) == pytest.approx(tail, abs=1e-12)


def test_signed_rank_counts_are_those_of_all_sign_patterns() -> None:
    for n in range(1, 9):
        sums = [sum(r for r, sign in enumerate(signs, 1) if sign) for signs in itertools.product((0, 1), repeat=n)]
        assert distributions.signed_rank_counts(n) == tuple(sums.count(w) for w in range(n * (n + 1) // 2 + 1))


@pytest.mark.parametrize(("n", "critical"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52), (25, 89)])
def test_signed_rank_depth_is_one_above_the_tabled_critical_value(n: int, critical: int) -> None:
    assert distributions.signed_rank_depth(n, 0.95) == critical + 1  # two-sided 5 % of Wilcoxon's table


def test_hodges_lehmann_estimate_and_interval_of_the_published_example() -> None:
    assert stats.hodges_lehmann(CHANGE) == pytest.approx(-0.46)
    interval = stats.signed_rank_interval(CHANGE)
    assert limits(interval) == pytest.approx((-0.786, -0.010))


@pytest.mark.parametrize(("n", "level"), [(5, 0.95), (4, 0.90)])
def test_signed_rank_interval_refuses_levels_that_it_cannot_reach(n: int, level: float) -> None:
    with pytest.raises(ValueError, match=f"{n} values are too few"):
        stats.signed_rank_interval([0.1 * i for i in range(n)], level)
    stats.signed_rank_interval([0.1 * i for i in range(n + 1)], level)


def test_ties_and_zeros_keep_the_interval_closed_around_them() -> None:
    assert stats.signed_rank_interval([0.0] * 6) == stats.Interval(0.0, 0.0, 0.95)
    assert stats.signed_rank_interval([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]) == stats.Interval(0.0, 1.0, 0.95)


def test_ties_and_zeros_do_not_lower_the_coverage() -> None:
    rng = random.Random(1)
    samples = ([rng.choice((-1, 0, 0, 1)) for _ in range(8)] for _ in range(2000))
    assert sum(stats.signed_rank_interval(sample).contains(0) for sample in samples) / 2000 >= 0.95


def test_t_interval_is_fishers_for_darwins_maize() -> None:
    interval = stats.t_interval(MAIZE)
    assert statistics.fmean(MAIZE) == pytest.approx(20.93, abs=0.01)
    assert limits(interval) == pytest.approx((0.03, 41.84), abs=0.01)


def test_paired_ratio_changes_method_at_6_pairs() -> None:
    logs = [0.1, 0.2, 0.3, 0.4, 0.5]
    by_mean = stats.paired_ratio(logs)
    assert by_mean.method == "t"
    assert by_mean.ratio == pytest.approx(math.exp(0.3))
    half = 2.7764 * math.sqrt(0.025) / math.sqrt(5)
    assert by_mean.interval is not None
    assert math.log(by_mean.interval.high) == pytest.approx(0.3 + half, abs=1e-4)
    by_ranks = stats.paired_ratio([*logs, 9.0])
    assert by_ranks.method == "signed-rank"
    assert by_ranks.ratio == pytest.approx(math.exp(0.35))  # 11th of 21 Walsh averages; the 9 does not matter
    assert by_ranks.interval is not None
    assert limits(by_ranks.interval) == pytest.approx((math.exp(0.1), math.exp(9.0)))


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    assert stats.paired_ratio([0.0]) == stats.PairedRatio(1.0, None, 1, "single")


def test_log_ratios_are_second_over_first() -> None:
    assert stats.log_ratios([1.0, 2.0], [2.0, 1.0]) == [pytest.approx(math.log(2)), pytest.approx(-math.log(2))]


@pytest.mark.parametrize(("first", "second"), [([0.0], [1.0]), ([1.0], [math.nan]), ([1.0], [math.inf]), ([1.0], [])])
def test_log_ratios_refuse_what_is_no_time(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError):
        stats.log_ratios(first, second)


def test_equivalence_is_the_90_percent_interval_inside_the_margin() -> None:
    logs = [-0.01, 0.0, 0.01, 0.02]  # mean 0.005, standard error 0.006455; 2.3534 of them: -0.0102 to 0.0202
    assert stats.equivalent(logs, math.expm1(0.0203))
    assert not stats.equivalent(logs, math.expm1(0.0201))
    assert not stats.equivalent([0.0], 0.5)


def test_equivalence_is_the_same_from_both_sides() -> None:
    for shift in (-0.09, 0.09):
        assert stats.equivalent([shift - 0.001, shift, shift + 0.001], 0.10)
    for shift in (-0.097, 0.097):
        assert not stats.equivalent([shift - 0.001, shift, shift + 0.001], 0.10)


def test_pairs_to_settle_is_the_first_number_whose_intervals_are_narrow_enough() -> None:
    # (t_0.975 + t_0.95) sd / sqrt(n) <= ln 1.1 = 0.0953, by hand with the printed tables, for sd = 0.05:
    # n = 5: (2.776 + 2.132) 0.05 / 2.236 = 0.1097; n = 6: (2.571 + 2.015) 0.05 / 2.449 = 0.0936
    assert stats.pairs_to_settle(0.05, 0.10) == 6
    assert stats.pairs_to_settle(0.0, 0.10) == 2
    assert stats.pairs_to_settle(5.0, 0.01) is None
    with pytest.raises(ValueError, match="must be above 0"):
        stats.pairs_to_settle(0.05, 0.0)


@pytest.mark.parametrize("sd", [0.01, 0.02, 0.03, 0.08, 0.092, 0.3])
def test_one_pair_fewer_would_not_settle(sd: float) -> None:
    def width(n: int) -> float:
        return (
            sd * (distributions.student_t_quantile(0.975, n - 1) + distributions.student_t_quantile(0.95, n - 1)) / math.sqrt(n)
        )

    needed = stats.pairs_to_settle(sd, 0.05)
    assert needed is not None
    assert width(needed) <= math.log(1.05) < width(needed - 1)


def test_what_the_forecast_calls_settled_is_settled_whatever_the_effect() -> None:
    logs = [-0.03, -0.01, 0.0, 0.02, 0.02]
    needed = stats.pairs_to_settle(stats.effective_sd(logs), 0.08)
    assert needed is not None and needed <= 5
    for shift in (i / 1000 for i in range(-150, 151)):
        moved = [value + shift for value in logs]
        assert stats.equivalent(moved, 0.08) or not stats.location_interval(moved).contains(0.0)


def test_effective_sd_is_the_standard_deviation_below_6_pairs_and_robust_from_6() -> None:
    logs = [0.1, 0.3, 0.2, -0.1]
    assert stats.effective_sd(logs) == pytest.approx(statistics.stdev(logs))
    normal = [0.05 * statistics.NormalDist().inv_cdf((i + 0.5) / 20) for i in range(20)]
    assert stats.effective_sd(normal) == pytest.approx(0.05, rel=0.1)
    assert stats.effective_sd([*normal[:-1], 5.0]) < 0.1 < statistics.stdev([*normal[:-1], 5.0])


def test_upper_bound_is_exact_where_the_rule_of_three_rounds() -> None:
    assert stats.upper_bound(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert stats.upper_bound(0, 59) < 0.05 < stats.upper_bound(0, 58)  # 59 clean runs are the fewest that show 5 %
    assert stats.upper_bound(0, 1000) == pytest.approx(3 / 1000, rel=0.01)
    assert stats.upper_bound(7, 7) == 1.0
    bound = stats.upper_bound(2, 30)  # P(at most 2 of 30) = 5 % there
    assert sum(math.comb(30, j) * bound**j * (1 - bound) ** (30 - j) for j in range(3)) == pytest.approx(0.05)


@pytest.mark.parametrize(("k", "n"), [(1, 0), (3, 2), (-1, 4)])
def test_proportions_must_be_proportions(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="not a proportion"):
        stats.upper_bound(k, n)


@pytest.mark.parametrize("pairs", [3, 5, 6, 10])
def test_intervals_cover_the_true_centre(pairs: int) -> None:
    rng = random.Random(pairs)
    found = [stats.location_interval([rng.gauss(0.3, 0.1) for _ in range(pairs)]) for _ in range(1500)]
    assert 0.93 < sum(interval.contains(0.3) for interval in found) / 1500 < 0.985

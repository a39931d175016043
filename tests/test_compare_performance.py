"""harness.compare.performance on recorded and made-up launches."""

from __future__ import annotations

import ast
import dataclasses
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.compare.performance import bandwidth, distributions, launches, phases, scaling, schedule, stats, words
from harness.compare.performance import claim as claims
from harness.compare.performance import resolution as measured
from harness.compare.performance import verdict as performance
from harness.compare.performance.launches import Launch
from harness.compare.performance.schedule import Slot
from harness.errors import NotComparable

# Recorded on 2 shared cores, in the order launched: a Python process that times 24 loops; (pair, arm, median step
# in ms, start in s, share of run-delay). "b" starts without site-packages; "c" loops 1.2 times as often.
SAME = (
    (0, "a", 8.104, 0.0211, 0.0033), (0, "a", 7.373, 0.0203, 0.0024), (1, "a", 7.214, 0.0204, 0.0015),
    (1, "a", 7.214, 0.0200, 0.0126), (2, "a", 7.335, 0.0206, 0.0004), (2, "a", 7.726, 0.0209, 0.0007),
    (3, "a", 7.679, 0.0207, 0.0052), (3, "a", 7.631, 0.0208, 0.0015), (4, "a", 7.737, 0.0209, 0.0043),
    (4, "a", 7.616, 0.0205, 0.0015), (5, "a", 7.376, 0.0205, 0.0053), (5, "a", 7.613, 0.0208, 0.0009),
    (6, "a", 7.242, 0.0205, 0.0003), (6, "a", 7.550, 0.0216, 0.0000), (7, "a", 7.956, 0.0213, 0.0008),
    (7, "a", 7.628, 0.0233, 0.0000),
)  # fmt: skip
MORE_WORK = (
    (0, "a", 7.824, 0.0222, 0.0), (0, "c", 9.097, 0.0237, 0.0006), (1, "c", 9.712, 0.0245, 0.0002),
    (1, "a", 7.723, 0.0230, 0.0), (2, "a", 7.997, 0.0220, 0.0), (2, "c", 9.222, 0.0236, 0.0006),
    (3, "c", 9.386, 0.0237, 0.0), (3, "a", 7.384, 0.0213, 0.0), (4, "a", 7.501, 0.0214, 0.0001),
    (4, "c", 9.756, 0.0239, 0.0005), (5, "c", 9.498, 0.0228, 0.0001), (5, "a", 7.225, 0.0212, 0.0),
)  # fmt: skip
LIGHTER_START = (
    (0, "a", 7.399, 0.0215, 0.0005), (0, "b", 7.341, 0.0203, 0.0), (1, "b", 7.267, 0.0203, 0.0),
    (1, "a", 7.338, 0.0209, 0.0001), (2, "a", 7.806, 0.0211, 0.0), (2, "b", 7.647, 0.0199, 0.0),
    (3, "b", 7.104, 0.0191, 0.0), (3, "a", 7.837, 0.0212, 0.0), (4, "a", 7.555, 0.0217, 0.0),
    (4, "b", 7.439, 0.0197, 0.0001), (5, "b", 7.585, 0.0201, 0.0), (5, "a", 7.892, 0.0216, 0.0),
)  # fmt: skip

# The same process beside three busy loops: ms of each step, and of run-delay in it. Left alone, its median was 7.74 ms.
LOADED_STEPS = (
    32.05, 39.7, 31.57, 31.62, 31.58, 19.88, 43.37, 43.68, 51.53, 47.53, 47.61, 47.51,
    55.57, 19.43, 55.46, 41.12, 35.56, 26.13, 29.08, 27.56, 76.78, 43.42, 56.42, 34.1,
)  # fmt: skip
LOADED_DELAYS = (
    24.04, 32.02, 24.0, 24.0, 24.0, 12.44, 35.83, 35.95, 44.04, 40.1, 40.1, 40.1,
    48.07, 12.0, 48.03, 33.6, 28.0, 18.46, 21.55, 19.99, 68.95, 35.22, 48.12, 26.22,
)  # fmt: skip


def launch(step_s: float | Sequence[float] = 1.0, **changes: Any) -> Launch:
    """Return an undisturbed launch of 2 ranks on 2 cores."""
    steps = (step_s,) * 8 if isinstance(step_s, float) else tuple(step_s)
    plain = Launch("job 0", 0, 0, 1.0, steps, 64, 2, 1, "m1", cores=2, wall_s=10.0, run_delay_s=0.0, cpu_pressure=0.0)
    return dataclasses.replace(plain, **changes)


def arm(label: str, step_s: Sequence[float], **changes: Any) -> list[Launch]:
    """Return a launch for each time, of pairs 0, 1, ..."""
    return [launch(value, arm=label, pair=pair, order=pair, **changes) for pair, value in enumerate(step_s)]


def recorded(rows: Sequence[tuple[int, str, float, float, float]], label: str) -> list[Launch]:
    """Return the recorded launches of one arm."""
    rest = {"nprocs": 1, "wall_s": 1.0}
    return [
        launch(ms / 1000, arm=label, pair=pair, order=order, start_s=start_s, run_delay_s=share, **rest)
        for order, (pair, name, ms, start_s, share) in enumerate(rows)
        if name == label
    ]


# One launch


def test_a_launch_is_the_median_of_its_steps() -> None:
    assert launches.raw_step_s(launch((1.0, 9.0, 2.0))) == 2.0


def test_run_delay_is_subtracted_step_by_step_where_recorded() -> None:
    seen = launch(
        [ms / 1000 for ms in LOADED_STEPS],
        nprocs=1,
        step_delay_s=tuple(ms / 1000 for ms in LOADED_DELAYS),
        run_delay_s=0.784811,
        wall_s=0.97139,
    )
    assert launches.raw_step_s(seen) == pytest.approx(0.0404, abs=1e-4)  # 5 times what the work takes
    assert launches.launch_step_s(seen) == pytest.approx(0.00774, rel=0.03)
    by_share = dataclasses.replace(seen, step_delay_s=())
    assert launches.launch_step_s(by_share) == pytest.approx(0.00774, rel=0.03)
    assert launches.waiting(seen) == ["run-delay 80.8 %"]


@pytest.mark.parametrize("changes", [{"run_delay_s": None}, {"wall_s": 0.0}, {"nprocs": 3}, {"threads": 2}])
def test_run_delay_stays_where_it_is_unknown_or_the_launchs_own(changes: dict[str, Any]) -> None:
    assert launches.launch_step_s(launch(1.0, **{"run_delay_s": 4.0, **changes})) == 1.0
    assert launches.launch_step_s(launch(1.0, run_delay_s=4.0)) == pytest.approx(0.6)


def test_throughput_is_per_sample_and_start_is_as_measured() -> None:
    seen = launch(2.0, start_s=3.0, run_delay_s=5.0)
    assert launches.seconds(seen, "throughput", adjusted=True) == pytest.approx(1 / 64)
    assert launches.seconds(seen, "throughput", adjusted=False) == pytest.approx(2 / 64)
    assert launches.seconds(seen, "start", adjusted=True) == 3.0


def test_a_launch_without_measured_steps_says_what_to_set() -> None:
    with pytest.raises(NotComparable, match="job 0 has no measured step: set steps above"):
        launches.raw_step_s(launch(()))


def test_data_workers_crowd_the_cores_too() -> None:
    assert not launch(1.0, nprocs=2).crowded
    assert launch(1.0, nprocs=2, workers=1).crowded and not launch(1.0, nprocs=1, workers=1).crowded
    pair = [launch(1.0, arm=name, workers=1, run_delay_s=0.2) for name in ("job 0", "job 1")]
    said = "job 0 runs 2 ranks with 1 thread and 1 data worker each on 2 cores: its run-delay is its own, none is subtracted."
    assert said in performance.compare(pair[:1], pair[1:]).sentences


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"run_delay_s": 0.5, "others_s": 9.0}, []),
        ({"run_delay_s": 0.51, "others_s": 1.04}, ["run-delay 5.1 % beside others on 0.10 cores"]),
        ({"cpu_pressure": 0.10, "others_s": 9.0}, []),
        ({"cpu_pressure": 0.11, "others_s": 9.0}, ["CPU pressure 11.0 % beside others on 0.90 cores"]),
        ({"throttled": 1, "major_faults": 2}, ["throttled 1 times", "2 major page faults"]),
        ({"run_delay_s": 9.0, "cpu_pressure": 0.9, "nprocs": 4}, []),
        ({"nprocs": 4, "major_faults": 1}, ["1 major page faults"]),
        ({"run_delay_s": 9.0, "cores": None}, []),
        (
            {"run_delay_s": None, "involuntary_switches": 12, "others_s": 9.0},
            ["1.5 involuntary context switches per step beside others on 0.90 cores"],
        ),
        ({"run_delay_s": 0.0, "involuntary_switches": 12, "others_s": 9.0}, []),
        # As recorded of 2 ranks on 2 quiet cores, beside a busy loop, and of 4 ranks without and with it.
        ({"run_delay_s": 0.5, "cpu_pressure": 0.227, "others_s": 0.59}, []),
        (
            {"run_delay_s": 3.12, "cpu_pressure": 0.471, "others_s": 9.52},
            ["run-delay 31.2 % beside others on 0.95 cores", "CPU pressure 47.1 % beside others on 0.95 cores"],
        ),
        ({"run_delay_s": 1.66, "cpu_pressure": 0.602, "others_s": 0.54, "nprocs": 4}, []),
        (
            {"run_delay_s": 1.82, "cpu_pressure": 0.598, "others_s": 7.29, "nprocs": 4},
            ["run-delay 18.2 % beside others on 0.73 cores", "CPU pressure 59.8 % beside others on 0.73 cores"],
        ),
    ],
)
def test_contamination_names_each_reason(changes: dict[str, Any], reasons: list[str]) -> None:
    assert launches.contamination(launch(1.0, **changes)) == reasons


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"wall_s": 0.14}, "too short to tell (0.14 s of measured steps; use more)"),
        ({"wall_s": 0.14, "nprocs": 4, "cpu_pressure": 0.6}, "too short to tell (0.14 s of measured steps; use more)"),
        ({"wall_s": 0.14, "others_s": 0.0}, ""),
        ({"wall_s": 0.0}, ""),
        ({"run_delay_s": 9.0}, "run-delay 90.0 %, and who made it wait is not known"),
        ({"run_delay_s": 9.0, "nprocs": 4}, ""),
        ({}, ""),
    ],
)
def test_where_nobody_can_tell_who_made_ranks_wait_nobody_is_accused(changes: dict[str, Any], why: str) -> None:
    seen = launch(1.0, **changes)
    assert (launches.untold(seen), launches.contamination(seen)) == (why, [])


def test_the_number_for_a_table_is_of_steps_or_of_launches() -> None:
    one, steps_spread = launches.typical([launch((1.0, 2.0, 3.0))], "throughput")
    assert one == 2.0
    assert steps_spread == pytest.approx(1.4826)
    assert launches.typical(arm("a", [1.0, 1.0, 4.0]), "throughput") == (1.0, 0.0)
    assert math.isnan(launches.typical([launch()], "start")[1])


# Order


@pytest.mark.parametrize("seed", range(6))
def test_the_schedule_is_a_pilot_and_abba(seed: int) -> None:
    slots = schedule.schedule(4, seed, ("a", "b"))
    first, second = (slots[0].arm, "b" if slots[0].arm == "a" else "a")
    assert [slot.arm for slot in slots] == [first, *(first, second, second, first) * 2]
    assert [slot.pair for slot in slots] == [None, 0, 0, 1, 1, 2, 2, 3, 3]
    assert [slot.order for slot in slots] == list(range(9))
    assert slots == schedule.schedule(4, seed, ("a", "b"))


def test_the_starting_arm_is_drawn() -> None:
    started = [schedule.schedule(1, seed, ("a", "b"), pilot=False)[0].arm for seed in range(200)]
    assert 70 < started.count("a") < 130


def test_three_arms_run_forth_and_back() -> None:
    arms = [slot.arm for slot in schedule.schedule(2, 0, ("a", "b", "c"), pilot=False)]
    assert arms[3:] == arms[:3][::-1]


@pytest.mark.parametrize(("pairs", "arms"), [(0, ("a", "b")), (2, ("a", "a"))])
def test_a_schedule_needs_pairs_and_different_arms(pairs: int, arms: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="at least 1 pair and different arms"):
        schedule.schedule(pairs, 0, arms)


def _run(slots: Sequence[Slot], dirty: set[int]) -> list[Launch]:
    return [launch(1.0, arm=slot.arm, pair=slot.pair, order=slot.order, throttled=int(slot.order in dirty)) for slot in slots]


def test_contaminated_pairs_are_repeated_in_the_same_order_of_arms() -> None:
    slots = schedule.schedule(3, 0, ("a", "b"))
    again = schedule.repeats(slots, _run(slots, dirty={4}))
    assert [(slot.order, slot.pair, slot.replaces) for slot in again] == [(7, 3, 1), (8, 3, 1)]
    assert [slot.arm for slot in again] == [slot.arm for slot in slots if slot.pair == 1]


def test_at_most_2_pairs_are_repeated_in_all() -> None:
    slots = schedule.schedule(4, 0, ("a", "b"))
    launches = _run(slots, dirty={1, 3, 5})
    again = schedule.repeats(slots, launches)
    assert [slot.replaces for slot in again] == [0, 0, 1, 1]
    assert schedule.repeats([*slots, *again], [*launches, *_run(again, dirty={again[0].order})]) == []


def test_a_repeat_that_is_contaminated_too_is_repeated() -> None:
    slots = schedule.schedule(2, 0, ("a", "b"))
    again = schedule.repeats(slots, launches := _run(slots, dirty={1}))
    last = schedule.repeats([*slots, *again], [*launches, *_run(again, dirty={5})])
    assert {(slot.pair, slot.replaces) for slot in last} == {(3, 2)}
    assert [slot.order for slot in last] == [7, 8]


def test_a_pair_with_a_missing_launch_is_repeated_and_a_dirty_pilot_is_not() -> None:
    slots = schedule.schedule(2, 0, ("a", "b"))
    launches = _run(slots, dirty={0})
    assert schedule.repeats(slots, launches) == []
    assert {slot.replaces for slot in schedule.repeats(slots, launches[:-1])} == {1}


def test_a_pair_that_is_too_short_to_tell_is_not_repeated_in_vain() -> None:
    slots = schedule.schedule(2, 0, ("a", "b"))
    short = [dataclasses.replace(one, wall_s=0.1, cpu_pressure=0.25) for one in _run(slots, dirty=set())]
    assert schedule.repeats(slots, short) == []


# What may be compared


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"samples_per_step": 128}, "global_batch_size is 128 against 64"),
        ({"nprocs": 4, "threads": 2}, "nprocs is 4 against 2; threads is 2 against 1"),
        ({"machine": "m2"}, "machine is m2 against m1"),
        ({"step_s": (1.0,) * 9}, "steps is 9 against 8"),
    ],
)
def test_different_conditions_are_not_compared(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(NotComparable, match=f"^job 3 cannot be compared with job 0: {text}.$"):
        performance.compare([launch()], [launch(**{"arm": "job 3", **changes})])


def test_launches_of_one_arm_must_be_alike_as_well() -> None:
    odd = launch(1.0, pair=1, order=3, threads=2)
    with pytest.raises(NotComparable, match=r"job 0 \(launch 3\) cannot be compared with job 0 \(launch 0\): threads"):
        performance.compare([launch(), odd], arm("job 1", [1.0, 1.0]))


def test_what_is_varied_on_purpose_may_differ() -> None:
    verdict = performance.compare([launch(nprocs=1)], [launch(0.5, arm="job 2")], varied=("nprocs",))
    assert verdict.ratio == pytest.approx(0.5)


@pytest.mark.parametrize("launches", [[], [launch(pair=None)]])
def test_an_arm_without_launches_is_not_compared(launches: list[Launch]) -> None:
    with pytest.raises(NotComparable, match="has no launch that counts"):
        performance.compare([launch()], launches)


# Verdicts


def test_faster_is_said_with_interval_and_pairs() -> None:
    ratios = (1.75, 1.80, 1.82, 1.84, 1.86, 1.90)
    verdict = performance.compare(arm("job 0", ratios), arm("job 2", [1.0] * 6))
    assert verdict.verdict == "faster"
    assert verdict.sentences[0] == "1.83x faster (95 % interval 1.75 to 1.90, 6 pairs)"
    assert verdict.label == "1.83x faster"
    assert verdict.ratio == pytest.approx(1 / 1.83, rel=0.01)
    assert verdict.interval is not None and verdict.interval.low == pytest.approx(1 / 1.90)
    assert verdict.adjusted == verdict.raw


def test_slower_is_the_same_from_the_other_side() -> None:
    ratios = (1.75, 1.80, 1.82, 1.84, 1.86, 1.90)
    verdict = performance.compare(arm("job 2", [1.0] * 6), arm("job 0", ratios))
    assert verdict.sentences[0] == "1.83x slower (95 % interval 1.75 to 1.90, 6 pairs)"


def test_equivalent_comes_before_a_difference_too_small_to_matter() -> None:
    verdict = performance.compare(arm("job 0", [1.0] * 4), arm("job 1", [1.020, 1.021, 1.022, 1.021]), margin=0.05)
    assert verdict.interval is not None and not verdict.interval.contains(1.0)
    assert verdict.verdict == "equivalent"
    assert verdict.label == "equivalent +-5%"
    assert verdict.sentences[0] == "equivalent +-5% (95 % interval of the time ratio 1.02 to 1.02, 4 pairs)"


def test_inconclusive_says_how_many_more_pairs_would_settle_it() -> None:
    # sd of the log ratios 0.1: (t_0.975 + t_0.95) 0.1 / sqrt(n) <= ln 1.1 from n = 17; by hand, t_16: 2.120 + 1.746
    logs = [-0.1, 0.0, 0.0, 0.1]
    scale = 0.1 / math.sqrt(0.02 / 3)
    verdict = performance.compare(arm("job 0", [1.0] * 4), arm("job 3", [math.exp(scale * d) for d in logs]))
    assert verdict.verdict == verdict.label == "inconclusive"
    assert verdict.needed_pairs == 17
    assert verdict.sentences[0].startswith("inconclusive: 13 more pairs would settle 10 % (95 % interval of the time ratio")


def test_an_undecided_comparison_never_needs_0_more_pairs() -> None:
    logs = (-0.005, 0.09, 0.097, 0.099, 0.1, 0.101)  # narrow by width, but lopsided: 0 and more than ln 1.1 are both in
    verdict = performance.compare(arm("job 0", [1.0] * 6), arm("job 1", [math.exp(d) for d in logs]))
    assert verdict.needed_pairs is not None and verdict.needed_pairs <= 6
    assert verdict.sentences[0].startswith("inconclusive: 1 more pair would settle 10 %")


def test_one_launch_claims_nothing() -> None:
    verdict = performance.compare([launch((1.0, 1.1, 0.9, 1.0))], [launch((0.1, 0.11, 0.1, 0.1), arm="job 1")])
    assert verdict.verdict == "inconclusive"
    assert verdict.interval is None
    assert verdict.sentences[0].startswith("inconclusive: one launch claims nothing beyond its own spread")
    assert "job 0 1.00 +- 0.07 s" in " ".join(verdict.sentences)
    assert verdict.ratio == pytest.approx(0.1)


def test_the_guess_from_one_launch_rests_on_the_spread_of_its_steps() -> None:
    steps = (0.95, 1.0, 1.0, 1.05, 0.95, 1.05)  # median 1, median absolute deviation 0.05
    verdict = performance.compare([launch(steps)], [launch(steps, arm="job 1")])
    expected = stats.pairs_to_settle(math.hypot(0.07413, 0.07413), 0.10)
    assert verdict.needed_pairs == expected
    assert f"if launches vary as much as steps do, {expected} pairs would settle 10 %" in verdict.sentences[0]


def test_start_up_has_its_own_margin_and_no_forecast_from_one_launch() -> None:
    alone = performance.compare([launch()], [launch(1.0, arm="job 1", start_s=2.0)], "start")
    assert (alone.margin, alone.needed_pairs) == (0.20, None)
    assert alone.ratio == pytest.approx(2.0)


def test_contaminated_pairs_are_left_out_and_named() -> None:
    baseline, candidate = arm("job 0", [1.0] * 5), arm("job 1", [1.0, 1.01, 1.0, 0.99, 9.0])
    candidate[4] = dataclasses.replace(candidate[4], run_delay_s=3.0, others_s=9.0)
    verdict = performance.compare(baseline, candidate)
    assert (verdict.verdict, verdict.pairs) == ("equivalent", 4)
    assert verdict.contaminated == {4: ("job 1: run-delay 30.0 % beside others on 0.90 cores",)}
    assert "pair 4 is left out as disturbed: job 1: run-delay 30.0 % beside others on 0.90 cores." in verdict.sentences


def test_short_windows_claim_nothing_of_steps_and_all_of_the_start() -> None:
    short = {"wall_s": 0.14, "cpu_pressure": 0.23}
    arms = arm("job 0", [1.0] * 4, **short), arm("job 1", [0.5] * 4, start_s=2.0, **short)
    verdict = performance.compare(*arms)
    assert (verdict.verdict, verdict.label, verdict.pairs, verdict.contaminated) == ("inconclusive", "cannot tell", 0, {})
    why = "job 0: too short to tell (0.14 s of measured steps; use more)"
    assert verdict.sentences[0] == f"inconclusive: no clean pair ({why})"
    assert performance.compare(*arms, "start").label == "2.00x slower"
    assert measured.resolution(arms[0]) is None and measured.resolution(arms[0], "start") is not None
    assert "nothing can be said of steps, 4 of 4 launches cannot tell (too short" in measured.unresolved(arms[0])
    plain = arm("plain", [1.0] * 4, nprocs=1)
    assert scaling.scaling("strong", plain, None, arms[0]).sentence == f"no scaling: {why}"


def test_one_clean_pair_of_several_is_said_to_be() -> None:
    verdict = performance.compare(
        arm("job 0", [1.0] * 6), [launch(1.0, arm="job 1"), *arm("job 1", [1.0] * 6, throttled=1)[1:]]
    )
    assert verdict.sentences[0].startswith("inconclusive: 1 of 6 pairs was clean, and one pair claims nothing beyond its own")
    assert verdict.left_out == 5


@pytest.mark.parametrize("start_s", [0.0, math.nan, -1.0])
def test_a_time_that_is_none_is_not_compared(start_s: float) -> None:
    with pytest.raises(NotComparable, match="job 0 and job 1 cannot be compared: a ratio needs positive, finite values"):
        performance.compare([launch()], [launch(1.0, arm="job 1", start_s=start_s)], "start")


def test_only_contaminated_pairs_give_no_number() -> None:
    verdict = performance.compare(arm("job 0", [1.0] * 3), arm("job 1", [1.0] * 3, major_faults=1))
    assert (verdict.verdict, verdict.ratio, verdict.pairs) == ("inconclusive", None, 0)
    assert verdict.sentences[0] == "inconclusive: no clean pair (3 pairs disturbed)"


def test_launches_without_any_partner_give_no_number() -> None:
    verdict = performance.compare([launch(pair=0)], [launch(1.0, arm="job 1", pair=1)])
    assert verdict.sentences[0] == "inconclusive: no launch of one arm has a partner in the other"
    assert verdict.label == "inconclusive"


def test_launches_are_paired_by_number_and_pilots_left_aside() -> None:
    baseline = [launch(5.0, pair=None), *arm("job 0", [1.0, 2.0, 4.0])]
    candidate = arm("job 1", [1.0, 2.0, 4.0])[::-1][:2]
    verdict = performance.compare(baseline, candidate)
    assert verdict.pairs == 2
    assert verdict.ratio == pytest.approx(1.0)
    assert "left out, as the other arm's launch is missing: 1." in verdict.sentences


def test_adjusted_times_that_measured_times_contradict_make_no_claim() -> None:
    baseline = arm("job 0", [1.0, 1.001, 0.999, 1.0])
    candidate = arm("job 1", [1.0, 1.001, 0.999, 1.0], run_delay_s=0.4)  # equal as measured, 4 % less once adjusted
    verdict = performance.compare(baseline, candidate, margin=0.01)
    assert verdict.verdict == "inconclusive"
    assert verdict.sentences[0].startswith("inconclusive: without run-delay 1.04x faster (")
    assert "but as measured equivalent +-1% (" in verdict.sentences[0]


def test_another_claim_by_measured_times_contradicts_even_where_the_intervals_overlap() -> None:
    adjusted, raw = [0.055, 0.056, 0.057], [0.05, 0.12, 0.13, 0.14]
    assert claims.claim(adjusted, 0.10) == "equivalent"
    assert claims.claim(raw, 0.10) == "slower"
    assert stats.location_interval(raw).contains(0.056)
    assert claims.contradict(adjusted, raw, 0.10)
    assert not claims.contradict(raw, raw, 0.10)


def test_adjusted_times_decide_where_measured_times_are_only_noisier() -> None:
    delays = (0.0, 0.1, 0.3, 0.45)
    work = (1.0, 0.999, 1.0, 1.001)
    candidate = [
        launch(
            w / (1 - delay / 10) ** 5,
            arm="job 1",
            pair=i,
            step_delay_s=(w / (1 - delay / 10) ** 5 - w,) * 8,
            run_delay_s=delay,
        )
        for i, (w, delay) in enumerate(zip(work, delays, strict=True))
    ]
    verdict = performance.compare(arm("job 0", [1.0] * 4), candidate)
    assert verdict.raw is not None and verdict.raw.interval is not None
    assert verdict.raw.interval.high > 1.1
    assert verdict.verdict == "equivalent"
    assert any(note.startswith("as measured, run-delay included: time ratio 1.11") for note in verdict.sentences)


def test_one_arm_without_run_delay_leaves_both_as_measured() -> None:
    verdict = performance.compare(arm("job 0", [1.0] * 3, run_delay_s=None), arm("job 1", [1.0] * 3, run_delay_s=0.4))
    assert verdict.adjusted == verdict.raw
    assert "run-delay was not recorded in every launch: times are as measured." in verdict.sentences


def test_ranks_that_wait_for_each_other_are_said_to() -> None:
    crowd = {"nprocs": 4, "run_delay_s": 5.0, "cpu_pressure": 0.9}
    verdict = performance.compare(arm("job 0", [1.0] * 3, **crowd), arm("job 1", [0.5, 0.5, 0.51], **crowd))
    assert verdict.verdict == "faster"
    assert (
        "job 0 runs 4 ranks with 1 thread each on 2 cores: its run-delay is its own, none is subtracted." in verdict.sentences
    )


def test_what_waits_on_a_quiet_machine_waits_for_its_own() -> None:
    quiet = {"run_delay_s": 0.4, "cpu_pressure": 0.227, "others_s": 0.59}
    verdict = performance.compare(arm("job 0", [1.0] * 3, **quiet), arm("job 1", [0.5, 0.5, 0.51], **quiet))
    assert verdict.verdict == "faster" and verdict.adjusted == verdict.raw
    why = "job 0 had the cores to itself (others used 0.06 of them): its run-delay is its own, none is subtracted."
    assert why in verdict.sentences


def test_recorded_extra_work_is_found() -> None:
    verdict = performance.compare(recorded(MORE_WORK, "a"), recorded(MORE_WORK, "c"))
    assert verdict.verdict == "slower"
    assert verdict.interval is not None and verdict.interval.contains(1.2)


def test_recorded_equal_work_is_never_faster() -> None:
    verdict = performance.compare(recorded(LIGHTER_START, "a"), recorded(LIGHTER_START, "b"))
    assert verdict.verdict == "equivalent"
    start = performance.compare(recorded(LIGHTER_START, "a"), recorded(LIGHTER_START, "b"), "start", margin=0.03)
    assert start.verdict == "faster"
    assert start.sentences == ("1.07x faster (95 % interval 1.03 to 1.11, 6 pairs)",)


def test_verdicts_are_seldom_wrong() -> None:
    rng, wrong = random.Random(3), 0
    for _ in range(1000):
        logs = [rng.gauss(math.log(1.1), 0.08) for _ in range(6)]
        wrong += claims.claim(logs, 0.10) in ("faster", "equivalent")
    assert wrong <= 70  # 5 % of 1000, and 3 standard errors


# A/A


def test_resolution_of_recorded_launches_against_themselves() -> None:
    found = measured.resolution(recorded(SAME, "a"))
    assert found is not None
    assert not found.biased
    assert found.apparent.pairs == 8
    assert 1.03 < found.ratio < 1.10
    assert found.sentence == f"this machine tells ratios from {found.ratio:.2f} apart with 8 pairs"


def test_resolution_is_what_a_t_test_finds_with_80_percent_power() -> None:
    launches = [launch(math.exp(x), order=i, pair=i // 2) for i, x in enumerate((0, 0.1, 0.1, 0, 0, -0.1, -0.1, 0))]
    found = measured.resolution(launches)  # log ratios in ABBA order: 0.1, 0.1, -0.1, -0.1; sd 0.11547
    assert found is not None
    assert found.apparent.ratio == pytest.approx(1.0)
    assert math.log(found.ratio) == pytest.approx((3.1824 + 0.9785) * 0.11547 / 2, abs=1e-4)


def test_a_machine_that_differs_from_itself_is_called_biased() -> None:
    launches = [launch(x, order=i, pair=i // 2) for i, x in enumerate((1.0, 1.2, 1.21, 1.0, 1.0, 1.2))]
    found = measured.resolution(launches)
    assert found is not None and found.biased
    assert found.sentence.endswith("but a launcher differs from itself by 1.20: smaller ratios mean nothing")


def test_resolution_needs_2_clean_pairs() -> None:
    launches = [launch(1.0, order=i, pair=i // 2, throttled=i == 3) for i in range(4)]
    assert measured.resolution(launches) is None


# Scaling


def test_weak_efficiency_is_two_factors() -> None:
    plain, single = arm("plain", [1.0] * 3, nprocs=1), arm("ddp 1", [1.25] * 3, nprocs=1)
    many = arm("ddp 2", [2.0, 2.0, 2.0], samples_per_step=128)
    found = scaling.scaling("weak", plain, single, many)
    assert found.wrapping and found.spreading and found.efficiency
    assert found.wrapping.ratio == pytest.approx(0.8)
    assert found.spreading.ratio == pytest.approx(0.625)
    assert found.efficiency.ratio == pytest.approx(0.5)
    assert found.sentence == (
        "weak scaling to 2 ranks: efficiency 0.50 (95 % interval 0.50 to 0.50, 3 triples)"
        " = 0.80 (plain process to DDP; 0.80 to 0.80) x 0.62 (1 to 2 ranks; 0.62 to 0.62)"
    )


def test_strong_efficiency_divides_by_the_number_of_ranks() -> None:
    plain, single = arm("plain", [1.0], nprocs=1), arm("ddp 1", [1.0], nprocs=1)
    found = scaling.scaling("strong", plain, single, arm("ddp 2", [0.625]))
    assert found.efficiency and found.efficiency.ratio == pytest.approx(0.8)
    assert "(one launch each, no interval)" in found.sentence


def test_the_factors_of_an_efficiency_multiply_to_it_at_any_number_of_triples() -> None:
    rng = random.Random(1)
    plain, single, many = ([math.exp(rng.gauss(0, 0.1)) for _ in range(7)] for _ in range(3))
    plain[0] = 40.0
    found = scaling.scaling("strong", arm("a", plain, nprocs=1), arm("b", single, nprocs=1), arm("c", many))
    assert found.wrapping and found.spreading and found.efficiency
    assert found.wrapping.ratio * found.spreading.ratio == pytest.approx(found.efficiency.ratio)
    for one in (found.wrapping, found.spreading, found.efficiency):
        assert one.interval is not None and one.interval.contains(one.ratio)


def test_scaling_with_more_ranks_than_cores_is_not_defined() -> None:
    plain, single = arm("plain", [1.0], nprocs=1), arm("ddp 1", [1.0], nprocs=1)
    found = scaling.scaling("strong", plain, single, arm("ddp 4", [0.5], nprocs=4))
    assert found.sentence == "oversubscribed, scaling not defined"
    assert (found.efficiency, found.wrapping, found.spreading) == (None, None, None)


def test_scaling_without_a_clean_triple_gives_no_number() -> None:
    plain, single = arm("plain", [1.0], nprocs=1, throttled=1), arm("ddp 1", [1.0], nprocs=1)
    assert scaling.scaling("strong", plain, single, arm("ddp 2", [0.5])).efficiency is None


def test_scaling_refuses_batch_sizes_and_arms_that_do_not_fit() -> None:
    plain, single, many = arm("plain", [1.0], nprocs=1), arm("ddp 1", [1.0], nprocs=1), arm("ddp 2", [1.0])
    with pytest.raises(NotComparable, match="weak scaling of plain to 2 ranks needs global_batch_size=128, not 64, in ddp 2"):
        scaling.scaling("weak", plain, single, many)
    with pytest.raises(NotComparable, match="scaling starts from one process: nprocs is 2 in ddp 2"):
        scaling.scaling("strong", many, many, many)
    with pytest.raises(NotComparable, match="ddp 2 cannot be compared with plain: machine is m2 against m1"):
        scaling.scaling("strong", plain, single, arm("ddp 2", [1.0], machine="m2"))


# Communication


def test_the_straggler_is_named_with_how_often_it_was_slowest() -> None:
    found = bandwidth.straggler([[1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0], [1.5, 1.5, 1.5, 1.0]])
    assert found == bandwidth.Straggler(index=1.5, rank=2, share=0.75)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert bandwidth.algorithm_bandwidth(64 * 2**20, 0.5) == 128 * 2**20
    assert bandwidth.bus_bandwidth(1000, 0.001, 4) == pytest.approx(1.5e6)  # 2 (4 - 1) / 4
    assert bandwidth.bus_bandwidth(1000, 0.001, 1) == 0.0


# Phases


def test_phases_end_at_their_marks_in_order() -> None:
    marks = {name: 100.0 + i * i for i, name in enumerate(phases.PHASES)}
    found = phases.phases(dict(reversed(marks.items())))
    assert [part.phase for part in found] == list(phases.PHASES)[1:]
    assert [part.seconds for part in found] == [2 * i + 1 for i in range(15)]
    assert [part.owner for part in found] == ["launcher"] * 5 + ["framework"] * 9 + ["launcher"]
    assert sum(part.seconds for part in found) == 225.0


def test_a_missing_mark_joins_its_phase_to_the_next() -> None:
    found = phases.phases({"called": 0.0, "code entered": 1.0, "group ready": 4.0, "returned": 9.0})
    assert [(part.phase, part.seconds, part.owner) for part in found] == [
        ("code entered", 1.0, "launcher"),
        ("group ready", 3.0, "framework"),
        ("returned", 5.0, "framework"),
    ]


def test_marks_made_in_advance_take_no_time_and_the_phases_still_add_up() -> None:
    found = phases.phases({"called": 10.0, "process exists": 10.5, "torch imported": 3.0, "group ready": 11.0})
    assert [part.seconds for part in found] == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("marks", [{}, {"called": 1.0}, {"called": 1.0, "first step": math.nan}])
def test_fewer_than_2_marks_have_no_phase(marks: dict[str, float]) -> None:
    assert phases.phases(marks) == []


def test_an_unknown_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown marks \\['warmed'\\]"):
        phases.phases({"called": 0.0, "warmed": 1.0})


SIDE_BY_SIDE = {
    "harness.compare.performance",
    "harness.compare.correctness.agreement",
    *(f"harness.compare.performance.{name}" for name in ("claim", "distributions", "launches", "schedule", "words")),
}


@pytest.mark.parametrize(
    "module", [bandwidth, claims, distributions, launches, measured, phases, scaling, schedule, stats, performance, words]
)
def test_the_parent_pays_for_no_numerical_library(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"harness"}
    assert {name for name in names if name.startswith("harness")} <= {"harness", "harness.errors", *SIDE_BY_SIDE}

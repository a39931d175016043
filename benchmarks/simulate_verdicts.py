"""How often the verdicts of harness.compare.performance are wrong: simulated launches whose true ratio is known.

Prints Markdown tables, the same for the same arguments::

    python benchmarks/simulate_verdicts.py --launches 4000
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.compare.performance import claim as claims
from harness.compare.performance import stats
from harness.compare.performance import verdict as performance
from harness.compare.performance.launches import Launch

SD = 0.065
"""Standard deviation of a launch's log step time: what was left of 23 % once run-delay was subtracted (2 cores)."""

PAIRS = (3, 4, 5, 6, 8, 10, 20)
VERDICT_PAIRS = (4, 6, 10, 20)
RATIOS = (1.0, 1.05, 1.1, 1.5)
MARGIN = 0.10

Noise = Callable[[random.Random, int], list[float]]


def log_normal(rng: random.Random, launches: int) -> list[float]:
    """Return independent normal log times."""
    return [rng.gauss(0, SD) for _ in range(launches)]


def heavy_tailed(rng: random.Random, launches: int) -> list[float]:
    """Return log times by Student's t with 2 degrees of freedom, whose variance is infinite."""
    return [SD * rng.gauss(0, 1) / math.sqrt(rng.expovariate(1.0)) for _ in range(launches)]


def slowed(rng: random.Random, launches: int) -> list[float]:
    """Return log times of which one in ten is longer by 30 % on average."""
    return [rng.gauss(0, SD / 2) + (rng.expovariate(1 / 0.3) if rng.random() < 0.1 else 0) for _ in range(launches)]


def drifting(rng: random.Random, launches: int) -> list[float]:
    """Return log-normal times of a machine that slows down by 3 % with each launch."""
    return [0.03 * i + rng.gauss(0, SD) for i in range(launches)]


def wandering(rng: random.Random, launches: int) -> list[float]:
    """Return log-normal times on top of a random walk with 5 % a launch."""
    level, times = 0.0, []
    for noise in log_normal(rng, launches):
        level += rng.gauss(0, 0.05)
        times.append(level + noise)
    return times


NOISES: dict[str, Noise] = {
    "log-normal, sd 6.5 %": log_normal,
    "Student t, 2 df": heavy_tailed,
    "1 in 10 slowed 30 %": slowed,
    "drift 3 % a launch": drifting,
    "random walk 5 %": wandering,
}


def differences(noise: Noise, rng: random.Random, pairs: int) -> list[float]:
    """Return ln(T_candidate / T_baseline) of ``pairs`` in ABBA order, true ratio 1."""
    times = noise(rng, 2 * pairs)
    return [(a - b if i % 2 else b - a) for i, (a, b) in enumerate(zip(times[::2], times[1::2], strict=True))]


def coverage(noise: Noise, rng: random.Random, pairs: int, trials: int, level: float) -> float:
    """Return how often the interval holds the true ratio."""
    found = (stats.location_interval(differences(noise, rng, pairs), level) for _ in range(trials))
    return sum(interval.contains(0.0) for interval in found) / trials


def verdicts(noise: Noise, rng: random.Random, pairs: int, trials: int) -> dict[float, Counter[str]]:
    """Return the verdicts for each true ratio, all from the same noise."""
    counts: dict[float, Counter[str]] = {ratio: Counter() for ratio in RATIOS}
    for _ in range(trials):
        logs = differences(noise, rng, pairs)
        for ratio, count in counts.items():
            count[claims.claim([value + math.log(ratio) for value in logs], MARGIN)] += 1
    return counts


def loaded_launch(rng: random.Random, arm: str, pair: int, step_s: float) -> Launch:
    """Return a launch beside other processes: 3 % of its own noise, and run-delay that is over the limit in 1 of 5."""
    share = rng.expovariate(1 / 0.03)
    measured = step_s * math.exp(rng.gauss(0, 0.03)) * (1 + share)
    delay_s = share / (1 + share)
    return Launch(arm, 0, pair, 1.0, (measured,), 64, 2, 1, "here", wall_s=1.0, run_delay_s=delay_s)


def loaded_verdicts(rng: random.Random, pairs: int, trials: int) -> dict[float, Counter[str]]:
    """Return verdicts of the whole comparison: adjusted, raw beside, contaminated pairs left out, none repeated."""
    counts: dict[float, Counter[str]] = {ratio: Counter() for ratio in RATIOS}
    for ratio, count in counts.items():
        for _ in range(trials):
            arms = [
                [loaded_launch(rng, arm, pair, step_s) for pair in range(pairs)] for arm, step_s in (("a", 1.0), ("b", ratio))
            ]
            count[performance.compare(arms[0], arms[1], margin=MARGIN).verdict] += 1
    return counts


def row(cells: Iterable[object]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def head(cells: Sequence[object]) -> str:
    """Return the first two lines of a Markdown table."""
    return row(cells) + "\n|" + "---|" * len(cells)


def beyond_chance(share: float, trials: int) -> float:
    """Return 3 standard errors of a share: with some 200 cells, 2 would be passed by chance alone."""
    return 3 * math.sqrt(share * (1 - share) / trials)


def percent(share: float) -> str:
    """Return a share as a number of per cent."""
    return f"{100 * share:.1f}"


def print_coverage(trials: int, level: float) -> None:
    """Print a row for each kind of noise, a column for each number of pairs; what falls short is in bold."""
    short = level - beyond_chance(level, trials)
    print(f"\nCoverage of the {level:.0%} interval, in %, by number of pairs ({trials} comparisons a cell)\n")
    print(head(["noise", *PAIRS]))
    for name, noise in NOISES.items():
        shares = [coverage(noise, random.Random(f"{name} {pairs} {level}"), pairs, trials, level) for pairs in PAIRS]
        print(row([name, *(f"**{percent(share)}**" if share < short else percent(share) for share in shares)]))


def print_verdicts(trials: int) -> None:
    """Print how often each verdict is given: the candidate's true time is 1.0 to 1.5 times the baseline's."""
    print(f"\nVerdicts in %: faster / slower / equivalent / inconclusive, margin {MARGIN:.0%}, {trials} trials a cell\n")
    print(head(["noise", "pairs", *(f"true time ratio {ratio}" for ratio in RATIOS)]))
    for name in (*NOISES, "others' load, adjusted"):
        for pairs in VERDICT_PAIRS:
            rng = random.Random(f"{name} {pairs}")
            noise = NOISES.get(name)
            counts = verdicts(noise, rng, pairs, trials) if noise else loaded_verdicts(rng, pairs, trials)
            print(row([name, pairs, *(verdict_cell(ratio, count) for ratio, count in counts.items())]))


def verdict_cell(ratio: float, count: Counter[str]) -> str:
    """Return the share of each verdict, in bold where false ones are above 5 % beyond chance.

    At 1.0 both directions are false; between 1 and the margin only "faster" is; from the margin on "equivalent" is too.
    """
    total = count.total()
    false = count["faster"] + (count["slower"] if ratio == 1.0 else 0)
    false += count["equivalent"] if ratio >= 1 + MARGIN else 0
    names = ("faster", "slower", "equivalent", "inconclusive")
    cell = " / ".join(percent(count[verdict] / total) for verdict in names)
    return f"**{cell}**" if false / total > 0.05 + beyond_chance(0.05, total) else cell


def print_forecast(trials: int) -> None:
    """Print how often the number of pairs that "would settle" a margin does, where the standard deviation is known."""
    print(f"\nComparisons settled in %, with the forecast number of pairs, log-normal noise ({trials} a cell)\n")
    print(head(["margin", "sd of a launch", "forecast pairs", *(f"true ratio {ratio}" for ratio in (1.0, 1.05, 1.1))]))
    for margin, sd in ((0.2, SD), (0.1, SD), (0.1, 0.02), (0.05, 0.02)):
        pairs = stats.pairs_to_settle(sd * math.sqrt(2), margin) or 0
        rng = random.Random(f"{margin} {sd}")
        shares = [settled(rng, pairs, sd * math.sqrt(2), margin, ratio, trials) for ratio in (1.0, 1.05, 1.1)]
        print(row([f"{margin:.0%}", f"{sd:.1%}", pairs, *(percent(share) for share in shares)]))


def settled(rng: random.Random, pairs: int, sd: float, margin: float, ratio: float, trials: int) -> float:
    """Return how often a verdict other than inconclusive is given."""
    centre = math.log(ratio)
    found = (claims.claim([rng.gauss(centre, sd) for _ in range(pairs)], margin) for _ in range(trials))
    return sum(verdict != "inconclusive" for verdict in found) / trials


def print_stopping(trials: int) -> None:
    """Print what a stop rule does that looks at the width after each pair, from 4 to 20, and never at the effect."""
    print(f"\nStopping as soon as the margin is settled by width, at most 20 pairs ({trials} comparisons a row)\n")
    print(head(["noise", "margin", "mean pairs", "coverage of the 95% interval", "faster or slower at true ratio 1.0"]))
    for name, noise in NOISES.items():
        for margin in (0.1, 0.2):
            rng = random.Random(f"{name} {margin}")
            found = [stopped(differences(noise, rng, 20), margin) for _ in range(trials)]
            covered = sum(stats.location_interval(logs).contains(0.0) for logs in found) / trials
            false = sum(claims.claim(logs, margin) in ("faster", "slower") for logs in found) / trials
            mean = sum(map(len, found)) / trials
            shown = f"**{percent(covered)}**" if covered < 0.95 - beyond_chance(0.05, trials) else percent(covered)
            print(row([name, f"{margin:.0%}", f"{mean:.1f}", shown, percent(false)]))


def stopped(logs: Sequence[float], margin: float) -> Sequence[float]:
    """Return the pairs that are made until the forecast says that there are enough."""
    for pairs in range(4, len(logs)):
        needed = stats.pairs_to_settle(stats.effective_sd(logs[:pairs]), margin)
        if needed is not None and needed <= pairs:
            return logs[:pairs]
    return logs


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4000, help="simulated comparisons for each cell of the tables")
    trials = parser.parse_args().launches
    print_coverage(trials, 0.95)
    print_coverage(trials, 0.90)
    print_verdicts(trials)
    print_forecast(trials)
    print_stopping(trials)


if __name__ == "__main__":
    main()

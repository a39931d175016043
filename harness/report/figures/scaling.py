"""How fast jobs train by their number of ranks, beside the ideal."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from harness.compare.performance import stats
from harness.compare.plans import OBSERVING
from harness.report.figures.series import MOST_LINES, trained
from harness.report.figures.theme import Drawing, figure, line, shorten
from harness.report.figures.timeline import oversubscribed
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.sweep_report import JobReport, SweepReport


def scaling(sweep: SweepReport) -> Drawing | None:
    """Draw samples per second by number of ranks with the ideal line, for fixed global and for fixed local batches."""
    panels = {kind: series for kind in ("strong", "weak") if (series := _series(trained(sweep), kind))}
    if not panels:
        return None
    made, all_axes = figure(3.6, len(panels))
    crowded = False
    for axes, (kind, series) in zip(all_axes, panels.items(), strict=True):
        crowded |= _scaling_panel(axes, kind, series, sweep)
    remark = " Hollow points are oversubscribed: more ranks than cores, so scaling is not defined." if crowded else ""
    lines = [line for series in panels.values() for line in series.items()][:MOST_LINES]
    rates = [f"{name}: {', '.join(f'{n} ranks {rate:.0f}/s' for n, (rate, _) in points.items())}" for name, points in lines]
    alt = f"Samples per second by number of ranks, with ideal lines. {'; '.join(rates)}.{remark}"
    return Drawing("scaling", "Scaling", alt, made)


Points = dict[int, tuple[float, JobReport]]
"""Number of ranks -> (samples per second, an example)."""

NOT_OF_A_LINE = OBSERVING.union(
    ("global_batch_size", "seed", "steps", "epochs", "eval_every", "checkpoint_every", "resume", "stop_after")
)
"""Settings that may differ within a line: of several jobs that differ in nothing else, the median is drawn."""


def _series(jobs: Sequence[JobReport], kind: str) -> dict[str, Points]:
    groups: dict[tuple[tuple[str, str], ...], dict[int, list[JobReport]]] = {}
    for job in jobs:
        groups.setdefault(tuple(_line_of(job, kind).items()), {}).setdefault(job.plan.nprocs, []).append(job)
    # A single number of ranks shows nothing of how jobs scale.
    lines = {key: by_ranks for key, by_ranks in groups.items() if len(by_ranks) > 1}
    drawn = {}
    for key, by_ranks in lines.items():
        points = {n: (_median_rate(by_ranks[n]), by_ranks[n][0]) for n in sorted(by_ranks)}
        # A line with a gap would be drawn across it, as if that had been measured.
        if not any(math.isnan(rate) for rate, _ in points.values()):
            drawn[_line_name(dict(key), [dict(other) for other in lines], points)] = points
    return drawn


def _line_of(job: JobReport, kind: str) -> dict[str, str]:
    """Return the settings, as text, that the jobs of one line have in common."""
    train = job.plan.train
    assert train is not None
    # What stays the same along a line is what names it: the global batch, or a rank's part of it.
    batch = train.global_batch_size if kind == "strong" else train.global_batch_size / job.plan.nprocs
    chosen = tables.settings(job)
    named = {"recipe": job.label.get("recipe", ""), "launcher": chosen["launcher"], "batch": f"{batch:g}"}
    # threads=auto is the same choice for every number of ranks, though not the same number.
    rest = {"threads": chosen.get("threads", "auto"), **dict(tables.flattened(dataclasses.asdict(train)))}
    texts = {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in rest.items()}
    return named | {name: text for name, text in texts.items() if name not in NOT_OF_A_LINE}


def _line_name(common: Mapping[str, str], lines: Sequence[Mapping[str, str]], points: Points) -> str:
    """Return recipe, launcher and batch, then whatever else tells a line from the others."""
    differing = [name for name in common if len({other.get(name) for other in lines}) > 1]
    words = [f"{name}={common[name]}" for name in differing if name not in ("recipe", "launcher", "batch")]
    # Threads that change with the number of ranks are part of what the line shows.
    threads = {n: job.plan.threads for n, (_, job) in points.items()}
    if len(set(threads.values())) > 1:
        words.append(f"threads {' / '.join(map(str, threads.values()))}")
    return ", ".join([f"{common['recipe']} {common['launcher']}".strip(), f"batch {common['batch']}", *words])


def _median_rate(jobs: Sequence[JobReport]) -> float:
    return stats.median([times.samples_per_s(job) for job in jobs])


def _scaling_panel(axes: Axes, kind: str, series: Mapping[str, Points], sweep: SweepReport) -> bool:
    crowded = False
    for number, (name, points) in enumerate(list(series.items())[:MOST_LINES]):
        look = line(number)
        colour = look["color"]
        ranks, rates = list(points), [rate for rate, _ in points.values()]
        hollow = [oversubscribed(job, sweep.machine.get("cores", "")) for _, job in points.values()]
        crowded |= any(hollow)
        axes.plot(ranks, rates, **look, label=shorten(name, 60))
        # The ideal starts from the line's own first point, as jobs of one rank need not be among them.
        axes.plot([ranks[0], ranks[-1]], [rates[0], rates[0] * ranks[-1] / ranks[0]], ":", color=colour, linewidth=1, alpha=0.8)
        for n, rate, is_hollow in zip(ranks, rates, hollow, strict=True):
            axes.plot([n], [rate], "o", color=colour, fillstyle="none" if is_hollow else "full", markersize=7)
    axes.set_xticks(sorted({n for points in series.values() for n in points}))
    # From 0, so that twice as fast looks twice as high.
    axes.set_ylim(bottom=0)
    cores = sweep.machine.get("cores", "?")
    note = f"\n(hollow: oversubscribed, more ranks than\n{cores} cores, scaling not defined)" if crowded else ""
    batch = "global" if kind == "strong" else "local"
    axes.set(xlabel=f"ranks (dotted: ideal){note}", ylabel="samples/s")
    axes.set_title(f"{kind.capitalize()}: the {batch} batch stays")
    axes.legend(loc="best")
    return crowded

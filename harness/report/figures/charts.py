"""What is drawn of a sweep. Each function returns None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness.compare.performance import stats
from harness.compare.performance.phases import Phase
from harness.report.figures.grids import checks_grid, fault_matrix
from harness.report.figures.scaling import scaling
from harness.report.figures.series import MOST_LINES, named, shown_of, trained
from harness.report.figures.theme import BLUE, GREY, ORANGE, RED, SKY, Drawing, figure, line, styled
from harness.report.figures.timeline import of_server, thinned, typical_start_up
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.sweep_report import JobReport, SweepReport

MOST_ROWS = 40
"""A picture with a row per job shows so many of them; the table has all."""
# More points than a picture this wide can tell apart would only make its SVG larger.
MOST_POINTS = 400
TIMELINE_JOBS = 6
TIMELINE_STEPS = 25

PHASE_COLOURS = {
    "launcher": ("#00466e", BLUE, SKY, "#a9d8f5", "#7f9fb8"),
    "framework": ("#7a3300", RED, ORANGE, "#f5cf7a", "#c9a27a", "#e0b9a0"),
}


def drawings(sweep: SweepReport) -> list[Drawing]:
    """Return all pictures that a sweep has data for."""
    draw = (loss_curves, start_up, step_times, scaling, time_line, checks_grid, fault_matrix)
    with styled():
        return [drawing for make in draw if (drawing := make(sweep)) is not None]


# Loss


def loss_curves(sweep: SweepReport) -> Drawing | None:
    """Draw each job's loss over all ranks by step, and its evaluations as dots."""
    jobs = trained(sweep)
    if not jobs:
        return None
    made, (axes,) = figure(3.4 + 0.11 * min(len(jobs), MOST_LINES + 1))
    labelled = jobs[:MOST_LINES]
    # The rest goes below the named ones and all in grey: more than so many colours nobody tells apart.
    for job in jobs[MOST_LINES:]:
        axes.plot(*_curve(job), color=GREY, linewidth=0.6, alpha=0.5)
    for number, job in enumerate(labelled):
        # Equal curves lie on top of each other: each is narrower than the one below.
        look, width = line(number), 1.2 + 0.5 * (len(labelled) - 1 - number)
        axes.plot(*_curve(job), **look, linewidth=width, label=named(job, sweep))
        evaluations = [evaluation for evaluation in job.result.ranks[0].evaluations if "loss" in evaluation.metrics]
        axes.plot(
            [e.step for e in evaluations], [e.means()["loss"] for e in evaluations], "o", color=look["color"], markersize=5
        )
    if len(jobs) > MOST_LINES:
        # A line without points, which is there for the legend alone.
        axes.plot([], [], color=GREY, label=f"{len(jobs) - MOST_LINES} other jobs")
    axes.set(xlabel="step", ylabel="loss, mean over the global batch", title="Loss (dots: evaluation)")
    made.legend(loc="outside lower center", ncols=2 if len(labelled) < 9 else 3)
    ends = [job.result.losses()[-1] for job in jobs]
    alt = f"Training loss by step of {len(jobs)} job(s). The last losses lie between {min(ends):.4g} and {max(ends):.4g}."
    return Drawing("loss", "Loss", alt, made)


def _curve(job: JobReport) -> tuple[list[int], list[float]]:
    losses = job.result.losses()
    chosen = thinned(len(losses), MOST_POINTS)
    return [job.result.ranks[0].steps[i].step for i in chosen], [losses[i] for i in chosen]


# Start-up


def start_up(sweep: SweepReport) -> Drawing | None:
    """Draw the phases from the call to the first step, stacked, for each launcher and number of ranks."""
    groups: dict[str, list[JobReport]] = {}
    for job in trained(sweep):
        ranks = f"{job.plan.nprocs} rank{'s' if job.plan.nprocs > 1 else ''}"
        groups.setdefault(f"{tables.settings(job)['launcher']}, {ranks}", []).extend(times.starts(job))
    stacks = {name: phases for name, jobs in groups.items() if (phases := typical_start_up(jobs))}
    if not stacks:
        return None
    made, (axes,) = figure(1.7 + 0.42 * len(stacks))
    colours = _phase_colours([phase for phases in stacks.values() for phase in phases])
    for row, phases in enumerate(stacks.values()):
        _stack(axes, row, phases, colours)
    axes.set_yticks(range(len(stacks)), [f"{name} ({_launches(len(groups[name]))})" for name in stacks])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(
        xlabel=f"seconds from the call to the end of the first step (median over launches)\n{of_server(sweep.jobs)}".rstrip(),
        title="Start-up: launcher plain + framework hatched",
        xlim=(0, 1.35 * max(sum(phase.seconds for phase in phases) for phases in stacks.values())),
    )
    # By name, so that a phase that one launcher owns alone and another shares stands in the legend once.
    looks: dict[str, dict[str, Any]] = {
        name: {"facecolor": colour, "hatch": _hatch(owner)} for (name, owner), colour in colours.items()
    }
    handles = [Patch(label=name, edgecolor="white", linewidth=0, **look) for name, look in looks.items()]
    made.legend(handles=handles, loc="outside lower center", ncols=4)
    totals = [f"{name}: {sum(p.seconds for p in phases):.2f} s" for name, phases in stacks.items()]
    return Drawing("start-up", "Start-up", f"Stacked bars of the phases of start-up. Totals: {'; '.join(totals)}.", made)


def _launches(count: int) -> str:
    return f"{count} launch{'es' if count > 1 else ''}"


def _phase_colours(phases: Sequence[Phase]) -> dict[tuple[str, str], str]:
    names: dict[str, list[str]] = {"launcher": [], "framework": []}
    for phase in phases:
        if phase.phase not in names[phase.owner]:
            names[phase.owner].append(phase.phase)
    return {
        (name, owner): PHASE_COLOURS[owner][i % len(PHASE_COLOURS[owner])]
        for owner, phase_names in names.items()
        for i, name in enumerate(phase_names)
    }


def _stack(axes: Axes, row: int, phases: Sequence[Phase], colours: Mapping[tuple[str, str], str]) -> None:
    left = 0.0
    for phase in phases:
        look: dict[str, Any] = {"color": colours[phase.phase, phase.owner], "hatch": _hatch(phase.owner), "edgecolor": "white"}
        axes.barh(row, phase.seconds, left=left, height=0.65, linewidth=0, **look)
        left += phase.seconds
    launcher = sum(phase.seconds for phase in phases if phase.owner == "launcher")
    sums = f"{left:.2f} s = {launcher:.2f} + {left - launcher:.2f}"
    axes.annotate(sums, (left, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)


def _hatch(owner: str) -> str:
    # Hatched as well as coloured, for whoever cannot tell the colours apart, and for print.
    return "///" if owner == "framework" else ""


# Step times


def step_times(sweep: SweepReport) -> Drawing | None:
    """Draw how each job's step times are distributed, over its launches, and the ratio of speeds with its interval."""
    jobs, remark = shown_of([job for job in trained(sweep) if _launched_steps(job)], MOST_ROWS)
    if not jobs:
        return None
    compared = any(job.speed is not None and job.speed.ratio is not None for job in jobs)
    side_by_side = {"width_ratios": [3, 2], "sharey": True} if compared else {}
    made, axes = figure(1.3 + 0.32 * len(jobs), 2 if compared else 1, **side_by_side)
    factor, unit = tables.unit_of_time([times.step_s(job) for job in jobs])
    for row, job in enumerate(jobs):
        _distribution(axes[0], row, [seconds * factor for seconds in _launched_steps(job)])
    axes[0].set_yticks(range(len(jobs)), [f"{named(job, sweep)}{times.mark(job)}" for job in jobs])
    # From high to low, so that the first job is the top row, as in the table.
    axes[0].set_ylim(len(jobs) - 0.4, -0.6)
    axes[0].grid(axis="y", visible=False)
    doubted = "\n!: disturbed, or too short to tell" if any(map(times.mark, jobs)) else ""
    legend = f"(line 5-95 %, bar quartiles, tick median){doubted}"
    axes[0].set(xlabel=f"{unit} per step, slowest rank\n{legend}", title=f"Step time{remark}")
    _stretch(axes[0], [t * factor for job in jobs for t in _launched_steps(job)])
    if compared:
        _ratios(axes[1], jobs)
    # The first ten, as a text that is read aloud must come to an end.
    medians = [f"job {job.plan.job}: {times.step_s(job) * factor:.3g} {unit}" for job in jobs[:10]]
    return Drawing("step-times", "Step times", f"Distributions of the step times. Medians: {'; '.join(medians)}.", made)


def _launched_steps(job: JobReport) -> list[float]:
    """Return the measured steps of all launches that the table's number is of."""
    return [seconds for launch in times.launches(job) for seconds in times.step_times(launch)]


def _distribution(axes: Axes, row: int, seconds: Sequence[float]) -> None:
    low, first, centre, third, high = (stats.quantile(seconds, p) for p in (0.05, 0.25, 0.5, 0.75, 0.95))
    # Some steps as they are beside the quantiles, in which two heaps of them would look like one.
    chosen = [seconds[i] for i in thinned(len(seconds), 60)]
    axes.plot(chosen, [row + 0.26] * len(chosen), "|", color=GREY, markersize=4, alpha=0.6)
    axes.plot([low, high], [row, row], color=BLUE, linewidth=1.2)
    axes.plot([first, third], [row, row], color=BLUE, linewidth=7, alpha=0.55, solid_capstyle="butt")
    axes.plot([centre], [row], "|", color=RED, markersize=13, markeredgewidth=2)


def _stretch(axes: Axes, seconds: Sequence[float]) -> None:
    """Use a logarithmic scale where jobs differ too much for one that starts at 0; leave rare, far outliers outside."""
    # One step that took a hundred times as long would else press all others into the left margin.
    low, high = stats.quantile(seconds, 0.02), stats.quantile(seconds, 0.98)
    if low > 0 and high / low > 20:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, high * 1.15)


def _ratios(axes: Axes, jobs: Sequence[JobReport]) -> None:
    axes.axvline(1.0, color=GREY, linewidth=1)
    for row, job in enumerate(jobs):
        speed = job.speed
        if speed is None or speed.ratio is None:
            words = "baseline" if job.baseline == job.plan.job else "not compared"
            axes.annotate(words, (1.0, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
            continue
        # Verdicts are ratios of times; the picture is of speeds, so that further right is faster, and the ends change places.
        centre = 1 / speed.ratio
        if speed.interval is not None:
            axes.plot([1 / speed.interval.high, 1 / speed.interval.low], [row, row], color=ORANGE, linewidth=2.5)
        filled = "full" if speed.interval is not None else "none"
        axes.plot([centre], [row], "o", color=ORANGE, fillstyle=filled, markersize=6)
    single = any(job.speed is not None and job.speed.pairs == 1 for job in jobs)
    remark = "hollow: one launch, no claim" if single else "95 % interval"
    axes.set(xlabel=f"times the baseline's speed\n({remark})", title="Speed")
    axes.grid(axis="y", visible=False)
    # From 0, so that lengths can be compared by eye.
    axes.set_xlim(left=0)
    axes.margins(x=0.25)


# Time line


def time_line(sweep: SweepReport) -> Drawing | None:
    """Draw when each rank was in which step, over the first steps of the first jobs."""
    jobs, remark = shown_of(trained(sweep), TIMELINE_JOBS)
    if not jobs:
        return None
    rows: list[str] = []
    made, (axes,) = figure(1.4 + 0.26 * sum(job.plan.nprocs for job in jobs))
    for job in jobs:
        # One origin for all ranks of a job: CLOCK_MONOTONIC is the same for all processes of a machine.
        begin = min(rank.steps[0].t - rank.steps[0].seconds for rank in job.result.ranks if rank.steps)
        for rank in job.result.ranks:
            _rank_row(axes, len(rows), job, rank.rank, begin)
            rows.append(f"{named(job, sweep)}, rank {rank.rank}" if rank.rank == 0 else f"rank {rank.rank}")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    looks = {"warm-up, not counted": GREY, "even step": BLUE, "odd step": SKY}
    handles = [Patch(color=colour, label=name) for name, colour in looks.items()]
    made.legend(handles=handles, loc="outside lower center", ncols=3)
    axes.set(xlabel="ms since the first step began", title=f"First {TIMELINE_STEPS} steps of all ranks{remark}")
    alt = f"The first {TIMELINE_STEPS} steps of every rank of {len(jobs)} job(s): one bar per step, a row per rank."
    return Drawing("time-line", "Time line of the ranks", alt, made)


def _rank_row(axes: Axes, row: int, job: JobReport, rank: int, begin: float) -> None:
    steps = job.result.ranks[rank].steps[:TIMELINE_STEPS]
    warmup = job.plan.train.warmup_steps if job.plan.train else 0
    spans = [((step.t - step.seconds - begin) * 1e3, step.seconds * 1e3) for step in steps]
    colours = [GREY if i < warmup else (SKY if step.step % 2 else BLUE) for i, step in enumerate(steps)]
    axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=colours)

"""Scaling over ranks, in two factors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.compare.correctness.agreement import plural
from harness.compare.performance import stats
from harness.compare.performance.launches import (
    Launch,
    adjustable,
    counted,
    doubts,
    launch_step_s,
    raw_step_s,
    reasons,
    require_comparable,
)
from harness.errors import NotComparable


@dataclass(frozen=True)
class Scaling:
    """Efficiency of N ranks in two factors, each with its interval; all None where scaling is not defined.

    Attributes:
        efficiency: Plain process to N ranks, 1 is perfect: the product of the other two, as all are means of logarithms.
        wrapping: Plain process to DDP with one rank.
        spreading: DDP with one rank to N ranks.
    """

    kind: Literal["weak", "strong"]
    nprocs: int
    efficiency: stats.PairedRatio | None
    wrapping: stats.PairedRatio | None
    spreading: stats.PairedRatio | None
    sentence: str


def scaling(
    kind: Literal["weak", "strong"], plain: Sequence[Launch], single: Sequence[Launch] | None, many: Sequence[Launch]
) -> Scaling:
    """Return weak efficiency T(1,b) / T(N,Nb), or strong T(1,B) / (N T(N,B)); T is the time of a step.

    Args:
        kind: ``weak`` (the batch of a rank stays) or ``strong`` (the global batch stays).
        plain: Launches of one process without DDP, which count as (1, b).
        single: Launches of DDP with one rank; None where there are none, so that the factors are not told apart.
        many: Launches of DDP with N ranks; all three are joined by ``pair``.

    Raises:
        NotComparable: Conditions or batch sizes do not fit.
    """
    # Without the middle arm the plain launches stand in for it: its factor comes to 1, and is not told.
    asked = ((plain, "plain"), (plain if single is None else single, "DDP of 1 rank"), (many, "DDP"))
    arms = [counted(arm, name) for arm, name in asked]
    last = next(iter(arms[2].values()))
    _require_scalable(kind, arms, last.nprocs)
    # Ranks that take turns on a core measure the scheduler, and a number would be quoted whatever words stood beside it.
    if any(launch.oversubscribed for launch in arms[2].values()):
        return Scaling(kind, last.nprocs, None, None, None, "oversubscribed, scaling not defined")
    triples = [tuple(arm[pair] for arm in arms) for pair in sorted(arms[0].keys() & arms[1].keys() & arms[2].keys())]
    # A triple counts as a whole: without one arm its factors would no longer multiply to its efficiency.
    clean = [triple for triple in triples if not (reasons(triple) or doubts(triple))]
    if not clean:
        return Scaling(kind, last.nprocs, None, None, None, f"no scaling: {_why_none(triples)}")
    return _scaling(kind, last.nprocs, clean, split=single is not None)


def _why_none(triples: Sequence[Sequence[Launch]]) -> str:
    disturbed = [why for triple in triples for why in reasons(triple)]
    vague = [why for triple in triples for why in doubts(triple)]
    if disturbed:
        return f"other processes disturbed {'all' if not vague else 'some'} launches ({disturbed[0]})"
    return vague[0] if vague else "no launches of all arms belong together"


def _require_scalable(kind: str, arms: Sequence[Mapping[int, Launch]], nprocs: int) -> None:
    # Number of ranks and batch are what scaling varies between the arms; within one they may not differ, and threads nowhere.
    one_process = [*arms[0].values(), *arms[1].values()]
    require_comparable(one_process)
    require_comparable([one_process[0], *arms[2].values()], varied=("nprocs", "global_batch_size"))
    require_comparable([*arms[2].values()])
    factor = nprocs if kind == "weak" else 1
    first, last = one_process[0], next(iter(arms[2].values()))
    if first.nprocs != 1:
        raise NotComparable(f"scaling starts from one process: nprocs is {first.nprocs} in {first.arm}.")
    if last.samples_per_step != factor * first.samples_per_step:
        needed = f"global_batch_size={factor * first.samples_per_step}, not {last.samples_per_step}"
        raise NotComparable(f"{kind} scaling of {first.arm} to {nprocs} ranks needs {needed}, in {last.arm}.")


def _scaling(kind: Literal["weak", "strong"], nprocs: int, triples: Sequence[tuple[Launch, ...]], split: bool) -> Scaling:
    # All or none, as in pair_evidence.
    adjust = all(adjustable(launch) for triple in triples for launch in triple)
    step_s = launch_step_s if adjust else raw_step_s
    plain, single, many = ([step_s(launch) for launch in arm] for arm in zip(*triples, strict=True))
    # T(1,B) / (N T(N,B)) against T(1,b) / T(N,Nb): only strong scaling divides the same work.
    scaled = [(nprocs if kind == "strong" else 1) * value for value in many]
    wrapping = stats.factor(stats.log_ratios(single, plain))
    spreading = stats.factor(stats.log_ratios(scaled, single))
    efficiency = stats.factor(stats.log_ratios(scaled, plain))
    factors = f"{_factor(wrapping, 'plain process to DDP')} x {_factor(spreading, f'1 to {nprocs} ranks')}"
    sure = "one launch each, no interval"
    if efficiency.interval is not None:
        sure = f"95 % interval {_limits(efficiency.interval)}, {plural(efficiency.pairs, 'triple')}"
    sentence = f"{kind} scaling to {plural(nprocs, 'rank')}: efficiency {efficiency.ratio:.2f} ({sure})"
    # Two factors would be told of which one was never measured.
    if not split:
        missing = f"{sentence}; a job with nprocs=1 ddp.wrap_one_rank=true would tell DDP's own share"
        return Scaling(kind, nprocs, efficiency, None, None, missing)
    return Scaling(kind, nprocs, efficiency, wrapping, spreading, f"{sentence} = {factors}")


def _factor(factor: stats.PairedRatio, what: str) -> str:
    limits = "" if factor.interval is None else f"; {_limits(factor.interval)}"
    return f"{factor.ratio:.2f} ({what}{limits})"


def _limits(interval: stats.Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"

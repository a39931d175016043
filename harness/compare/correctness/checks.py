"""The checks, a function each: from the evidence of one verification to what that check says. Pure arithmetic.

Steps are looked at in order, and stages within a step in causal order, so that the first thing wrong is where the fault
entered. What cannot be checked says so; what the evidence lacks without a reason is red.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from harness.compare.correctness import bounds, checks_start, checks_step
from harness.compare.correctness.agreement import against, at, plural, replayed, some, steps_of
from harness.compare.correctness.bounds import MOST_EXCESS, MOST_IN_FLOAT64, MOST_LOSS_ERROR, ROUND_OFF
from harness.compare.correctness.check import (
    NOT_DETERMINISTIC,
    Check,
    Incomplete,
    Mismatch,
    Origin,
    conclude,
    incomplete,
    not_checked,
    settle,
)
from harness.compare.correctness.checks_start import FACTS, OWN_FACTS
from harness.compare.correctness.evidence import Evidence, Mathematics, StepEvidence

ALONE = "one rank compared with itself says nothing"
OWN_STATE = "what a rank's own samples say, where one process says it of the whole batch"
BEFORE_STEPS = ("R0", "R1", "R2")
"""Checks of what comes before the first step, and needs none."""

IN_NARROW_TYPE = ("fp16", "bf16")
"""Settings of ddp.comm_hook that have a bound."""


def run_checks(evidence: Evidence) -> tuple[Check, ...]:
    """Return all checks that one verification's evidence speaks of, in their order."""
    # compare=quick takes no step twice, so that R13 is no row of it; elsewhere a missing one is told as not checked.
    looked_twice = evidence.get("observed_twice") is not None or evidence.get("tier") != "quick"
    return tuple(_look(name, ask, evidence) for name, ask in CHECKS.items() if name != "R13" or looked_twice)


def _look(name: str, ask: Callable[[Evidence], Check], evidence: Evidence) -> Check:
    try:
        return ask(evidence)
    except Incomplete as error:
        no_steps = "" if evidence.get("steps") else evidence.get("no_steps")
        # Without a step nothing of steps can be said, which proves nothing and accuses nobody.
        return not_checked(name, no_steps) if no_steps and name not in BEFORE_STEPS else incomplete(name, str(error))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        # Evidence comes from a file, which may be anything.
        return incomplete(name, f"the evidence cannot be read ({type(error).__name__}: {error})")


def contract(evidence: Evidence) -> Check:
    """R0: the ranks are those that were asked for, alike but for number and device, and all that trains is reduced."""
    alike = len(set(chain(*evidence["facts"])).union(FACTS).difference(OWN_FACTS))
    detail = f"{_ranks(evidence)} as asked, {alike} facts alike, every trainable parameter is covered"
    return conclude("R0", checks_start.in_contract(evidence), detail)


def partition(evidence: Evidence) -> Check:
    """R1: in each step the ranks' parts join to the global batch, in each epoch every sample is taken once."""
    found = evidence["partition"]
    # Without a step there are no loaded samples to look at, but the numbers of whole epochs are known all the same.
    steps = [] if evidence.get("no_steps") and not evidence["steps"] else steps_of(evidence)
    wrong = chain(checks_start.in_ids(evidence), _each(checks_start.in_batches, evidence, steps))
    detail = f"{plural(found['num_samples'], 'sample')}, each once in each of {plural(found['epochs'], 'epoch')}"
    if any(step["replayed_batches"] is not None for step in steps):
        detail += "; loaded samples are the reference's in bits"
    return conclude("R1", wrong, detail, 0)


def birth(evidence: Evidence) -> Check:
    """R2: at step 0 every rank has the reference's parameters, buffers and optimizer state."""
    detail = f"{plural(len(evidence['reference_birth']), 'tensor')} on {_ranks(evidence)} are the reference's in bits"
    return conclude("R2", checks_start.at_birth(evidence), detail)


def local_replay(evidence: Evidence) -> Check:
    """R3: each rank's losses and local gradients are those of one process that replays its shard."""
    steps = replayed(evidence, "replayed_losses", "replayed_local")
    if not steps:
        return not_checked("R3", _why_not(evidence))
    if not evidence["deterministic"]:
        return _local_replay_in_noise(evidence, steps)
    detail = f"losses and local gradients of {_ranks(evidence)} at {at(steps)} are the replay's in bits"
    return conclude("R3", _each(checks_step.in_local, evidence, steps), detail)


def _local_replay_in_noise(evidence: Evidence, steps: Sequence[StepEvidence]) -> Check:
    """R3 where kernels are not deterministic: the excess ratio X instead of bits."""
    tolerance = MOST_LOSS_ERROR * ROUND_OFF[evidence["precision"]]
    wrong = list(chain.from_iterable(checks_step.in_losses(evidence, step, tolerance) for step in steps))
    wrong += _each(checks_step.in_excess, evidence, steps)
    # Bits that differ by nobody knows how much prove nothing: what is red is red without a ratio, but green needs one.
    unmeasured = next(filter(None, (checks_step.unmeasured(evidence, step) for step in steps)), None)
    if unmeasured is not None and not wrong:
        return not_checked("R3", f"{NOT_DETERMINISTIC}; bits differ, and no excess ratio was measured ({unmeasured.place()})")
    worst = max((step["local_excess"] or 0.0 for step in steps), default=0.0)
    detail = f"losses and gradients at {at(steps)} are the replay's within noise instead of bits, because {NOT_DETERMINISTIC}"
    # All losses were collected before all gradients; a stable sort brings the earliest step first, its losses still before
    # them.
    return conclude("R3", sorted(wrong, key=_step), detail, worst, within=("measured", MOST_EXCESS))


def reduction(evidence: Evidence) -> Check:
    """R4: the reduced gradient is the mean of the local ones within the bound of a floating-point sum, the same on all ranks.

    The bound is ``gamma_k mean |g_r|`` elementwise, ``gamma_k = k u / (1 - k u)`` (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1); at two ranks the bits must agree. The evidence's ratios are errors by it. Where compression was
    asked for, ``u`` is that of the type in which gradients travel. Before the gradients of a step, statistics that synchronised
    layers exchange are looked at, which no compression changes.
    """
    steps, hook = steps_of(evidence), evidence.get("comm_hook", "none")
    if evidence["nprocs"] == 1:
        return not_checked("R4", f"nothing is reduced: {ALONE}")
    layers = plural(len(steps[0].get("exchange_ratio", {})), "synchronised layer")
    and_layers = "" if layers.startswith("0 ") else f"; statistics of {layers} are those of the ranks' batches"
    if hook not in ("none", *IN_NARROW_TYPE):
        # Gradients are then left alone, but the statistics of synchronised layers travel uncompressed, and keep their bound.
        first = next(_each(checks_step.in_exchanged, evidence, steps), None)
        why_not = f"ddp.comm_hook={hook} compresses gradients, with no bound on what is lost{and_layers}"
        return not_checked("R4", why_not) if first is None else conclude("R4", (first,), "")
    ratios = ({**step.get("exchange_ratio", {}), **step["reduction_ratio"]} for step in steps)
    worst = max((ratio for each in ratios for ratio in each.values()), default=math.nan)
    exactly = "in bits" if evidence["nprocs"] == 2 else "within the bound of its rounding"
    if hook in IN_NARROW_TYPE:
        exactly = f"within the rounding of ddp.comm_hook={hook}"
    detail = f"reduced gradients at {at(steps)} are the mean of the local ones {exactly}, and equal on all ranks{and_layers}"
    within: tuple[Origin, float] | None = ("declared", 1.0) if hook in IN_NARROW_TYPE else None
    return conclude("R4", _each(checks_step.in_reduced, evidence, steps), detail, worst, within=within)


def update(evidence: Evidence) -> Check:
    """R5: the state after a step is what the declared optimizer makes of state and gradient, and stays until the next step."""
    pairs = _pairs(steps_of(evidence))
    wrong = chain.from_iterable(checks_step.in_update(evidence, previous, step) for previous, step in pairs)
    first, steps = next(chain(wrong, checks_step.in_schedule(evidence)), None), replayed(evidence, "replayed_after")
    # A learning rate, or a state that changed between two steps, is wrong without any replay: only green waits for one.
    if first is None and not steps:
        return not_checked("R5", _why_not(evidence))
    detail = f"states of {_ranks(evidence)} after {at(steps)} are the replayed optimizer's in bits, at the declared lr"
    return conclude("R5", filter(None, (first,)), detail)


def ranks(evidence: Evidence) -> Check:
    """R6: the ranks stay equal in every step: state, learning rates, gradients.

    BatchNorm's buffers are each rank's own between two forwards, as in DDP; only synchronised ones must agree (else R11).
    """
    steps = steps_of(evidence)
    if evidence["nprocs"] == 1:
        return not_checked("R6", ALONE)
    buffers = ", synchronised buffers" if evidence["sync_bn"] else ""
    detail = f"states, lr, gradients{buffers} of {_ranks(evidence)} are equal in bits at {at(steps)}"
    return conclude("R6", _each(checks_step.between_ranks, evidence, steps), detail)


def mathematics(evidence: Evidence) -> Check:
    """R7: in float64, the ranks' gradient is the whole batch's: ``norm(d) <= 1e-11 max(norm(g_i), 1e-3 norm(g))``."""
    found, most_loss = evidence["float64"], MOST_IN_FLOAT64 / ROUND_OFF["float64"]
    if evidence["nprocs"] == 1:
        return not_checked("R7", ALONE)
    if found is None:
        quick = "compare=quick leaves it out, compare=full runs it" if evidence["tier"] == "quick" else ""
        return not_checked("R7", _why_no_mathematics(evidence, quick))
    wrong = bounds.in_mathematics(evidence, found, 1, most_loss, "{:.2g} times the bound")
    return conclude("R7", wrong, f"gradients are the whole batch's in float64 at {at(found)}", _worst(found))


def precision(evidence: Evidence) -> Check:
    """R8: in the run's own precision the ranks lose no more than an honest single process: X <= 4, loss within 32 u."""
    found = evidence["own_precision"]
    if evidence["nprocs"] == 1:
        return not_checked("R8", ALONE)
    if found is None:
        # X divides by the error that one process makes against float64, and a run in float64 makes none.
        itself = "the run is in float64 itself, which R7 checks" if evidence["precision"] == "float64" else ""
        return not_checked("R8", _why_no_mathematics(evidence, itself))
    said = f"excess ratio {{:.3g}}, at most {MOST_EXCESS:g} (measured)"
    wrong = bounds.in_mathematics(evidence, found, MOST_EXCESS, MOST_LOSS_ERROR, said)
    return conclude("R8", wrong, f"{evidence['precision']} loses what it loses in one process, at {at(found)}", _worst(found))


def report(evidence: Evidence) -> Check:
    """R9: losses are reported as the mean over all samples; metrics are sums and counts over all samples, once each."""
    steps, metrics = steps_of(evidence), evidence["evaluation"]
    wrong = chain(_each(bounds.in_report, evidence, steps), bounds.in_evaluation(evidence))
    random = bounds.random_metrics(evidence)
    compared = len(metrics or {}) - len(random)
    and_metrics = f" and {plural(compared, 'metric')}" if compared else ""
    but = f"; {', '.join(random)}: not checked, evaluation draws at random" if random else ""
    detail = f"losses at {at(steps)}{and_metrics} are means over all ranks{but}"
    return conclude("R9", wrong, detail, max(bounds.reported_error(step) for step in steps))


def buffers_and_rng(evidence: Evidence) -> Check:
    """R11: buffers after a step are the replay's, and random streams differ from rank to rank."""
    steps = steps_of(evidence)
    have_buffers = any(any(step["buffers"]) for step in steps)
    have_streams = evidence["uses_random"] and evidence["nprocs"] > 1
    first = next(_in_buffers_and_rng(evidence, steps, have_streams), None)
    # Buffers take up the noise of activations where kernels are not deterministic; random streams never do.
    if first is not None and (first.stage != "buffers" or evidence["deterministic"]):
        return conclude("R11", (first,), "")
    noise, unread = _noise_of_data(evidence)
    reason = _why_no_buffers(evidence, have_buffers, have_streams or bool(noise), first)
    if reason:
        return not_checked("R11", f"{reason}{unread}")
    kept = ["buffers are the replay's in bits"] * have_buffers + ["all ranks' random streams differ"] * have_streams
    return conclude("R11", (), f"{', '.join([*noise, *kept])}, at {at(steps)}{unread}")


def _noise_of_data(evidence: Evidence) -> tuple[list[str], str]:
    """Return what there is to say of noise that the data set draws by itself, and of readings that could not be had."""
    readings = evidence.get("readings")
    if readings is None:
        return [], ""
    if readings["why_not"]:
        return [], f"; whether ranks repeat each other's noise was not checked: {readings['why_not']}"
    # Said only where a data set was seen to draw: of one without noise it would sound like a test that was passed.
    return ["no rank's data set repeats the noise of another's"] * any(readings["changes"]), ""


def _in_buffers_and_rng(evidence: Evidence, steps: Sequence[StepEvidence], have_streams: bool) -> Iterator[Mismatch]:
    # First, though they belong to no step: noise that ranks share is in the samples of every step.
    yield from checks_start.in_readings(evidence)
    for previous, step in _pairs(steps):
        if have_streams:
            yield from checks_step.in_streams(evidence, step)
        yield from checks_step.in_drawn_samples(evidence, step)
        yield from checks_step.in_kept_buffers(evidence, previous, step)
        yield from checks_step.in_buffers(evidence, step)


def _why_no_buffers(evidence: Evidence, have_buffers: bool, have_streams: bool, first: Mismatch | None) -> str:
    if first is not None:
        return f"{NOT_DETERMINISTIC}, and buffers differ ({first.place()})"
    if have_buffers and not replayed(evidence, "replayed_buffers"):
        return _why_not(evidence)
    # Green would be wrong: DDP sends rank 0's buffers to all before the next forward, and what the other ranks' samples said is
    # lost.
    own = checks_step.own_buffers(evidence)
    if own:
        return f"forward leaves in '{own[0]}' {OWN_STATE}: the ranks should add it up (all_reduce)"
    if not have_buffers and evidence["has_batch_norm"]:
        return "the model has BatchNorm, but no buffer of it was recorded"
    if not have_buffers and not have_streams:
        return f"there are no buffers, and {'one rank has one random stream' if evidence['uses_random'] else 'no dropout'}"
    return ""


def observer(evidence: Evidence) -> Check:
    """R13: the same steps with nobody watching come to the same bits."""
    pairs, steps = evidence["observed_twice"], steps_of(evidence)
    if pairs is None:
        return not_checked("R13", "the steps were not taken twice")
    if len(pairs) != len(steps) or any(len(pair) != 2 for pair in pairs):
        raise Incomplete(f"{plural(len(pairs), 'state')} of {plural(len(steps), 'step')} were seen twice")
    wrong = chain.from_iterable(
        against([some(first, "the state")], [second], first, "state after", step["step"], "the watched run's")
        for step, (first, second) in zip(steps, pairs, strict=True)
    )
    # Rank 0 is enough here: compare_observed holds the training's first steps against what was verified on all ranks.
    return settle("R13", wrong, evidence["deterministic"], f"rank 0 comes to the same bits unwatched, at {at(steps)}")


def movement(evidence: Evidence) -> Check:
    """R14: each trainable tensor has a gradient and moves if it is not zero; without one it moves only as the replay does."""
    steps = steps_of(evidence)
    detail = f"{plural(len(steps[0]['movement']), 'trainable tensor')} moved as their gradients say, at {at(steps)}"
    return conclude("R14", _each(checks_step.in_movement, evidence, steps), detail)


CHECKS: dict[str, Callable[[Evidence], Check]] = {
    "R0": contract,
    "R1": partition,
    "R2": birth,
    "R3": local_replay,
    "R4": reduction,
    "R5": update,
    "R6": ranks,
    "R7": mathematics,
    "R8": precision,
    "R9": report,
    "R11": buffers_and_rng,
    "R13": observer,
    "R14": movement,
}


def _each(
    look: Callable[[Evidence, StepEvidence], Iterator[Mismatch]], evidence: Evidence, steps: Sequence[StepEvidence]
) -> Iterator[Mismatch]:
    for step in steps:
        yield from look(evidence, step)


def _pairs(steps: Sequence[StepEvidence]) -> Iterator[tuple[StepEvidence | None, StepEvidence]]:
    """Yield each step with the one before it."""
    return zip((None, *steps), steps, strict=False)


def _step(mismatch: Mismatch) -> int:
    # What belongs to no step was wrong before the first one.
    return -1 if mismatch.step is None else mismatch.step


def _ranks(evidence: Evidence) -> str:
    return plural(evidence["nprocs"], "rank")


def _why_not(evidence: Evidence) -> str:
    return evidence["steps"][0]["not_replayed"]


def _why_no_mathematics(evidence: Evidence, otherwise: str = "") -> str:
    why = evidence["not_mathematics"] or otherwise
    if not why:
        raise Incomplete("the ranks were not compared with the whole batch, and the evidence does not say why")
    return why


def _worst(found: Sequence[Mathematics]) -> float:
    # NaN where nothing was compared: a worst value of 0 would read as perfect.
    return max((ratio for each in found for ratio in each["ratios"].values()), default=math.nan)

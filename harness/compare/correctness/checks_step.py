"""What can be wrong within a step (R3 to R6, R11, R14): the links from a state to the next one, mostly in bits.

Each function yields mismatches in causal order, none where all is right.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from harness.compare.correctness.agreement import (
    against,
    among,
    backwards,
    finite,
    odd_rank,
    per_rank,
    relative,
    same,
    some,
    tensors,
    without,
)
from harness.compare.correctness.bounds import MOST_EXCESS
from harness.compare.correctness.check import Incomplete, Mismatch
from harness.compare.correctness.evidence import Digests, Evidence, StepEvidence

# --- R3: the local replay --------------------------------------------------------------------------------------------


def in_local(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R3: losses and local gradients whose bits are not the replay's; before them, the module in which they became so."""
    wrong = [*in_losses(evidence, step), *in_gradients(evidence, step)]
    if wrong:
        # They accuse nobody by themselves: what a module returns may hold memory that nobody reads.
        yield from _in_activations(step)
    yield from wrong


def _in_activations(step: StepEvidence) -> Iterator[Mismatch]:
    mine, replays = step.get("activations"), step.get("replayed_activations")
    if mine is None or replays is None:
        return
    for found in against(replays, mine, chain(*mine, *replays), "activation", step["step"], "the replay's"):
        yield dataclasses.replace(found, tensor=None, extra={"module": found.tensor or ""})


def in_losses(evidence: Evidence, step: StepEvidence, tolerance: float = 0.0) -> Iterator[Mismatch]:
    """R3: losses that are not the replay's, in bits or within a relative error."""
    mine = per_rank(evidence, step["losses"], "losses")
    replays = per_rank(evidence, step["replayed_losses"] or [], "replayed losses")
    # Empty lists agree with empty ones. A rank without samples has no loss, but not every rank is without.
    if not any(mine):
        raise Incomplete(f"no loss was recorded at step {step['step']}")
    for rank, (losses, others) in enumerate(zip(mine, replays, strict=True)):
        if len(losses) != len(others):
            yield Mismatch(f"it has {len(losses)} losses, and the replay {len(others)}", "loss", step["step"], rank)
            continue
        for loss, other in zip(losses, others, strict=True):
            # By their repr, which tells 0.0 from -0.0.
            near = repr(loss) == repr(other) or 0 < relative(loss, other) <= tolerance
            if not (near and finite(loss)):
                yield Mismatch(f"the loss is {loss!r} where the replay has {other!r}", "loss", step["step"], rank)


def in_gradients(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R3: local gradients whose bits are not the replay's, in the order of backward."""
    mine = per_rank(evidence, step["local"], "local gradients")
    replays = per_rank(evidence, step["replayed_local"] or [], "replayed gradients")
    _require_gradients(mine, step["step"])
    yield from against(replays, mine, backwards(*mine, *replays), "local gradient", step["step"], "the replay's")


def in_excess(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R3 with kernels that are not deterministic: gradients further from the replay's than noise (excess ratio X)."""
    differing = list(in_gradients(evidence, step))
    # A tensor that one side lacks has no distance from anything, so that no ratio excuses it.
    everywhere = set.intersection(*map(set, (*step["local"], *(step["replayed_local"] or []))))
    lacking = [mismatch for mismatch in differing if mismatch.tensor not in everywhere]
    yield from lacking
    excess = step["local_excess"]
    if differing and not lacking and excess is not None and not excess <= MOST_EXCESS:
        first = differing[0]
        seen = f"excess ratio {excess:.3g}, at most {MOST_EXCESS:g} (measured), with kernels that are not deterministic"
        yield Mismatch(seen, first.stage, first.step, first.rank, first.tensor, excess)


def unmeasured(evidence: Evidence, step: StepEvidence) -> Mismatch | None:
    """R3: the first gradient that differs in bits where nobody measured by how much."""
    return next(in_gradients(evidence, step), None) if step["local_excess"] is None else None


def _require_gradients(ranks: Sequence[Digests], step: int) -> None:
    # A frozen tensor is "none" on both sides and agrees; where all of them are, the step has proved nothing.
    if all(digest == "none" for gradients in ranks for digest in gradients.values()):
        raise Incomplete(f"no gradient was recorded at step {step}")


# --- R4 to R6: reduction, update, ranks ------------------------------------------------------------------------------


def in_exchanged(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R4: statistics of synchronised layers that are not those of the ranks' batches."""
    for layer, error in step.get("exchange_ratio", {}).items():
        if not error <= 1:
            seen = "what the ranks heard of each other's batches is not what these come to"
            yield Mismatch(seen, "statistics", step["step"], None, layer, error)


def in_reduced(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R4: reduced gradients that are not the mean of the local ones, or not equal on all ranks; in the order of backward.

    Before them, what synchronised layers exchanged.
    """
    yield from in_exchanged(evidence, step)
    reduced = per_rank(evidence, step["reduced"], "reduced gradients")
    local = per_rank(evidence, step["local"], "local gradients")
    _require_gradients(reduced, step["step"])
    for name in backwards(*local, *reduced, step["reduction_ratio"]):
        before, after = [each.get(name) or "" for each in local], [each.get(name) or "" for each in reduced]
        ratio = step["reduction_ratio"].get(name)
        odd = odd_rank(after)
        if "" in before or "" in after or ratio is None:
            # The last one is for a ratio that is missing: its index is twice the number of ranks, which comes to rank 0.
            rank = [*before, *after, ""].index("") % len(after)
            yield Mismatch("its local or its reduced gradient was not recorded", "reduced gradient", step["step"], rank, name)
        elif not ratio <= 1:
            alike = ", on all ranks alike" if odd is None else ""
            seen = f"{_by_bound(ratio, evidence['nprocs'])}{alike}"
            yield Mismatch(seen, "reduced gradient", step["step"], odd or 0, name, ratio)
        elif odd is not None:
            yield Mismatch("the bits differ from the other ranks'", "reduced gradient", step["step"], odd, name)
        # A rank without a gradient adds zeros to the others'; only where all have none is there nothing to reduce.
        elif (after[0] == "none") != (set(before) == {"none"}):
            seen = "local gradients have no reduced one" if after[0] == "none" else "it is reduced from no local gradient"
            yield Mismatch(seen, "reduced gradient", step["step"], 0, name)


def _by_bound(ratio: float, nprocs: int) -> str:
    if math.isnan(ratio):
        return "the error is not a number"
    if math.isinf(ratio) and nprocs == 2:
        return "not the mean of both ranks' gradients, whose bits must agree at nprocs=2"
    return f"{ratio:.2g} times the bound"


def in_update(evidence: Evidence, previous: StepEvidence | None, step: StepEvidence) -> Iterator[Mismatch]:
    """R5: state that changed between steps, a learning rate that is not declared, state that the optimizer did not make."""
    number, states = step["step"], _states_before(evidence, step)
    # Steps that are no neighbours say nothing of each other: the training went on between them.
    if previous is not None and previous["step"] + 1 == number:
        yield from against(previous["after"], states, tensors(*states), "state before", number, "the last step's")
    if previous is None and number == 0:
        born = [without(state, buffers) for state, buffers in zip(evidence["birth"], step["buffers"], strict=True)]
        yield from against(born, states, tensors(*states), "state before", number, "the state's at birth")
    yield from _in_lr(evidence, step)
    after = per_rank(evidence, step["after"], "states after the step")
    if step["replayed_after"] is not None:
        replay = some(step["replayed_after"], "the replayed state")
        yield from against([replay] * len(after), after, replay, "state after", number, "the replayed optimizer's")


def in_schedule(evidence: Evidence) -> Iterator[Mismatch]:
    """R5: a learning rate of a step to come that one process does not declare."""
    found: Any = evidence.get("schedule") or {}
    if "step" in found:
        seen = f"the learning rates are {found['lr']} where one process declares {found['declared']}"
        yield Mismatch(seen, "lr", found["step"], found["rank"])


def _states_before(evidence: Evidence, step: StepEvidence) -> list[Digests]:
    states = per_rank(evidence, step["before"], "states before the step")
    buffers = per_rank(evidence, step["buffers"], "buffers")
    return [without(state, own) for state, own in zip(states, buffers, strict=True)]


def _in_lr(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    declared = some(step["declared_lr"], "a declared learning rate")
    for rank, used in enumerate(per_rank(evidence, step["lr"], "learning rates")):
        if len(used) != len(declared):
            yield Mismatch(f"{len(used)} learning rates where {len(declared)} are declared", "lr", step["step"], rank)
            continue
        for group, (mine, other) in enumerate(zip(used, declared, strict=True)):
            # Exactly: a learning rate comes from settings and the number of the step, and nothing rounds it on the way.
            if not (finite(mine) and repr(mine) == repr(other)):
                seen = f"the learning rate of parameter group {group} is {mine!r} where {other!r} is declared"
                yield Mismatch(seen, "lr", step["step"], rank)


def between_ranks(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R6: state, gradients or learning rates that are not equal on all ranks."""
    number, before = step["step"], _states_before(evidence, step)
    reduced = per_rank(evidence, step["reduced"], "reduced gradients")
    after = per_rank(evidence, step["after"], "states after the step")
    rates = per_rank(evidence, step["lr"], "learning rates")
    odd = odd_rank([repr(rate) for rate in rates])
    yield from among(before, tensors(*before), "state before", number)
    yield from among(reduced, backwards(*reduced), "reduced gradient", number)
    if odd is not None:
        usual = next(rate for rate in rates if rate != rates[odd])
        yield Mismatch(f"learning rates {rates[odd]} against {usual}", "lr", number, odd)
    yield from among(after, tensors(*after), "state after", number)
    if evidence["sync_bn"] and any(step["buffers"]):
        # Evidence that does not name them is of a model all of whose buffers are synchronised.
        names = evidence.get("synchronised", tensors(*step["buffers"]))
        yield from among(step["buffers"], names, "buffers", number)


# --- R11 and R14 -----------------------------------------------------------------------------------------------------


def in_streams(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R11: ranks whose random numbers are the same, of torch's generator or of their devices' own."""
    own = step.get("device_rng", [])
    # On the CPU there is no generator of a device: its digests are empty there, and empty ones are no repetition.
    for streams in (step["rng"], own) if own and all(own) else (step["rng"],):
        first: dict[str, int] = {}
        for rank, digest in enumerate(per_rank(evidence, streams, "random states")):
            other = first.setdefault(digest, rank)
            if other != rank or not digest:
                yield Mismatch(f"it draws the random numbers of rank {other}", "rng", step["step"], rank)


def in_drawn_samples(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R11: ranks that loaded the very samples of another, of other numbers, from a data set that no reading comes to again."""
    if step["replayed_batches"] is not None:
        return
    first: dict[str, int] = {}
    for rank, (batch, losses) in enumerate(zip(step["batches"], step["losses"], strict=True)):
        # A rank without samples has no losses, and all empty batches are alike.
        other = first.setdefault(batch, rank) if losses else rank
        if other != rank:
            yield Mismatch(f"its samples are those of rank {other}, though their numbers are not", "batch", step["step"], rank)


def in_kept_buffers(evidence: Evidence, previous: StepEvidence | None, step: StepEvidence) -> Iterator[Mismatch]:
    """R11: buffers before the step that are neither what the last step left on this rank, nor rank 0's of it."""
    number = step["step"]
    # Without the step just before, nobody knows what was left.
    if number != (0 if previous is None else previous["step"] + 1):
        return
    kept = evidence["birth"] if previous is None else previous["buffers"]
    for rank, (state, names) in enumerate(zip(step["before"], step["buffers"], strict=True)):
        for name in names:
            if not any(name in found for found in (state, kept[rank], kept[0])):
                # Forward has made it in this step.
                continue
            # Rank 0's are as right as its own: DDP sends them to all ranks before a forward.
            if not any(same(state.get(name), buffers.get(name)) for buffers in (kept[rank], kept[0])):
                yield Mismatch("it changed between two steps", "state before", number, rank, name)


def in_buffers(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R11: buffers after the step that are not the replay's."""
    if step["replayed_buffers"] is None:
        return
    buffers = per_rank(evidence, step["buffers"], "buffers")
    replays = per_rank(evidence, step["replayed_buffers"], "replayed buffers")
    yield from against(replays, buffers, chain(*replays), "buffers", step["step"], "the replay's")


def own_buffers(evidence: Evidence) -> list[str]:
    """Return the buffers, but BatchNorm's, in which the ranks leave different things: DDP takes rank 0's for all."""
    known = evidence.get("batch_norm_buffers")
    if known is None:
        return []
    names = dict.fromkeys(name for step in evidence["steps"] for buffers in step["buffers"] for name in buffers)
    differing = {
        name for step in evidence["steps"] for name in names if len({buffers.get(name) for buffers in step["buffers"]}) > 1
    }
    return [name for name in names if name in differing and name not in known]


def in_movement(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R14: tensors without a gradient, that stand still though they have one, or that move though they have none."""
    found, trained = some(step["movement"], "any movement"), step["reduced"][0]
    for name in tensors(trained, found):
        flags = found.get(name)
        if flags is None or len(flags) != 5 or name not in trained:
            seen = "its movement was not recorded" if name in trained else "it is not one that is trained"
        else:
            seen = _wrongly_moved(flags, evidence["find_unused_parameters"], step["replayed_after"] is not None)
        if seen:
            yield Mismatch(seen, "movement", step["step"], 0, name)


def _wrongly_moved(flags: Sequence[bool], may_be_unused: bool, was_replayed: bool) -> str:
    has_gradient, is_not_zero, has_lr, moved, replay_moved = flags
    # A learning rate of 0, as in the first step of a warm-up, rightly moves nothing.
    must_move = has_gradient and is_not_zero and has_lr
    if not has_gradient and not may_be_unused:
        return "it has no gradient (ddp.find_unused_parameters=true allows that)"
    if must_move and not moved:
        return "its gradient is not zero, and it did not move"
    # Weight decay and momentum move a tensor whose gradient is zero: only the replay tells whether that is right.
    if not must_move and moved and was_replayed and not replay_moved:
        return "it moved without a gradient or a learning rate, and in the replay it did not"
    return ""

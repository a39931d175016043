"""What can be wrong before the first step (R0 to R2, R11): who takes part, what they would read, and how they are born.

Each function yields mismatches in causal order, none where all is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.compare.correctness.agreement import against, odd_rank, per_rank, plural, same, some
from harness.compare.correctness.check import Incomplete, Mismatch
from harness.compare.correctness.evidence import Evidence, StepEvidence

BY_CHANCE = 1e-6
"""Two epochs of n samples have the same order with probability 1/n!; where that is above this, nobody is accused of it."""

FEWEST_CHANGES = 8
"""Of readings that are the same on two ranks: fewer than that may be so by chance, or are a cache that fills."""

FACTS = ("world_size", "group_rank", "backend", "device", "dtype", "threads", "torch", "deterministic")
"""What every rank must have recorded of itself."""

OWN_FACTS = ("group_rank", "rank", "local_rank", "device", "host", "pid")
"""What may differ from rank to rank."""


def in_contract(evidence: Evidence) -> Iterator[Mismatch]:
    """R0: ranks that are missing, alone, unlike the others, or on one device; parameters that nothing reduces."""
    facts, asked = some(evidence["facts"], "any rank's facts"), evidence["asked_world_size"]
    for rank, each in enumerate(facts):
        size = each.get("world_size")
        if size != asked:
            yield Mismatch(f"it sees a world of {plural(size, 'rank')}, and {asked} were asked for", "contract", rank=rank)
        if each.get("group_rank") != rank:
            yield Mismatch(f"it calls itself rank {each.get('group_rank')}", "contract", rank=rank)
        # By identity: neither None, of a fact that was not recorded, nor 0 may pass for False.
        if each.get("deterministic") is not evidence["deterministic"]:
            seen = f"its deterministic is {each.get('deterministic')}, and {evidence['deterministic']} was asked for"
            yield Mismatch(seen, "contract", rank=rank)
        for name in FACTS:
            # A single rank may have joined no group, and has no backend then.
            if each.get(name) in (None, "") and (name, asked) != ("backend", 1):
                yield Mismatch(f"it did not record its {name}", "contract", rank=rank)
    if not len(facts) == evidence["nprocs"] == asked:
        yield Mismatch(f"{plural(len(facts), 'rank')} left facts, and {asked} were asked for", "contract")
    yield from _unlike_facts(facts)
    yield from _shared_devices(facts)
    for name in evidence["uncovered"]:
        yield Mismatch("no reduction covers this trainable parameter", "buckets", tensor=name)


def _unlike_facts(facts: Sequence[Mapping[str, Any]]) -> Iterator[Mismatch]:
    for name in dict.fromkeys(name for each in facts for name in each):
        # repr lets lists and mappings be counted, and tells 1 from True.
        values = [repr(each.get(name, "not recorded")) for each in facts]
        odd = odd_rank(values)
        if name not in OWN_FACTS and odd is not None:
            usual = next(value for value in values if value != values[odd])
            yield Mismatch(f"its {name} is {values[odd]} against {usual}", "contract", rank=odd)


def _shared_devices(facts: Sequence[Mapping[str, Any]]) -> Iterator[Mismatch]:
    taken: dict[tuple[str, str], int] = {}
    for rank, each in enumerate(facts):
        device = str(each.get("device"))
        # By host as well: cuda:0 of two machines are two devices. A machine's CPU is shared by its ranks on purpose.
        first = taken.setdefault((str(each.get("host")), device), rank)
        if first != rank and not device.startswith("cpu"):
            yield Mismatch(f"it shares {device} with rank {first}", "contract", rank=rank)


def in_ids(evidence: Evidence) -> Iterator[Mismatch]:
    """R1: sample numbers that are lost, repeated, out of place, or in the same order twice."""
    found = evidence["partition"]
    # Counts of 0 over no epoch would read as a clean partition.
    if not (found["num_samples"] >= 1 and found["epochs"] >= 1):
        raise Incomplete("no epoch's sample numbers were looked at")
    counts = {
        "ids of an epoch are taken by no rank": found["missing"],
        "ids of an epoch are taken more than once": found["repeated"],
        "steps have parts that do not join, in rank order, to the global batch": found["overlaps"],
    }
    # "!= 0", and below "is not False": evidence comes from a file, and null must not pass for nothing wrong.
    said = [f"{count} {what}" for what, count in counts.items() if count != 0]
    if found["orders_differ"] is not False:
        said.append("the ranks do not agree on the global batches")
    if found["same_order"] is not False and not _may_repeat(found["num_samples"], found["epochs"]):
        said.append("two epochs have the same order")
    if said:
        first = {key: value for key, value in (found["first"] or {}).items() if isinstance(value, str | int)}
        step, rank = (int(first.pop(key)) if key in first else None for key in ("step", "rank"))
        yield Mismatch("; ".join(said), "ids", step, rank, quantity=float(sum(counts.values())), extra=first)


def _may_repeat(num_samples: int, epochs: int) -> bool:
    # The union bound over all pairs of epochs. 20! is already far beyond any number of pairs, and larger ones only take time.
    return math.comb(epochs, 2) / math.factorial(min(num_samples, 20)) > BY_CHANCE


def in_batches(evidence: Evidence, step: StepEvidence) -> Iterator[Mismatch]:
    """R1: loaded samples that are not those of the ids."""
    batches = per_rank(evidence, step["batches"], "loaded samples")
    # A data set that draws at random gives other samples each time; R11 looks at those.
    if step["replayed_batches"] is None:
        return
    references = per_rank(evidence, step["replayed_batches"], "samples loaded by the reference")
    for rank, (mine, other) in enumerate(zip(batches, references, strict=True)):
        if not same(mine, other):
            yield Mismatch("the samples are not those that the reference loads for the same ids", "batch", step["step"], rank)


def at_birth(evidence: Evidence) -> Iterator[Mismatch]:
    """R2: state at step 0 that is not the reference's."""
    ranks = per_rank(evidence, evidence["birth"], "the state at birth")
    reference = some(evidence["reference_birth"], "the reference's state at birth")
    # One reference for all: ranks that agree with each other and are wrong alike must not pass.
    yield from against([reference] * len(ranks), ranks, reference, "birth", 0, "the reference's")


def in_readings(evidence: Evidence) -> Iterator[Mismatch]:
    """R11: ranks that read the same again and again, from data sets that draw by themselves."""
    readings = evidence.get("readings")
    if not readings or readings["why_not"]:
        return
    first: dict[str, int] = {}
    changes = per_rank(evidence, readings["changes"], "changes between readings")
    for rank, digest in enumerate(per_rank(evidence, readings["digests"], "readings of the same samples")):
        other = first.setdefault(digest, rank) if changes[rank] >= FEWEST_CHANGES else rank
        if other != rank:
            seen = (
                f"its data set repeats the noise of rank {other}'s: what it draws by a generator of its own (or by a count of "
                "what it has read), it draws alike on both; let the noise be a function of the sample's number, or draw it by "
                "torch's, numpy's or Python's common generator, which differs by rank"
            )
            yield Mismatch(seen, "data set", 0, rank)

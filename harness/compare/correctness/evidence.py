"""Evidence: what a verification leaves in ``evidence.json`` for the verdict, as plain data.

Rank 0 writes it. Every list over ranks is in rank order. A digest is a string that is equal if and only if the bits are; a
mapping ``tensor -> digest`` is in the model's order of parameters or buffers. Ratios are already divided by their bound, so
that at most 1 is right; they are the worst over elements, and may be ``inf`` or ``nan``.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

# Digests and not tensors: evidence of a large model stays small enough to be kept with every run.
Digests = dict[str, str]
"""Tensor -> digest, in the model's order; a gradient that is None has the digest ``none``."""


class Partition(TypedDict):
    """R1: which samples the ranks take."""

    num_samples: int
    epochs: int
    missing: int  # ids of an epoch that no rank takes, over the epochs looked at
    repeated: int  # ids of an epoch that are taken more than once
    overlaps: int  # steps in which the ranks' parts do not join, in rank order, to the global batch
    same_order: bool  # two epochs have the same order (never so with one sample)
    orders_differ: bool  # the ranks do not agree on the global batches
    first: dict[str, Any] | None  # epoch, step, rank and id of the first thing wrong


class Sums(TypedDict):
    """R9: (sum, count) of what is reported, against the reference's."""

    ranks: list[list[float]]  # [sum, count] of each rank, as recorded
    reference: list[list[float]]  # [sum, count] of each shard, by the replay (or by the ranks' own captured losses)
    reported: float  # the mean over all ranks, as it is reported


class StepEvidence(TypedDict):
    """One checked step: stages in causal order, each of the ranks against the reference."""

    step: int
    lr: list[list[float]]  # per rank: lr of each parameter group, used in this step
    declared_lr: list[float]  # by a scheduler of the reference's own
    rng: list[str]  # per rank: digest of the random state before the step
    device_rng: NotRequired[list[str]]  # per rank: the same of its CUDA device's own; empty on the CPU
    batches: list[str]  # per rank: digest of the loaded samples
    replayed_batches: list[str] | None  # as the reference loads the same ids; None where the data set draws random numbers
    before: list[Digests]  # per rank: parameters, buffers and optimizer state before it
    activations: NotRequired[list[Digests]]  # per rank: module -> what it returned, in that order; empty in compare=quick
    replayed_activations: NotRequired[list[Digests] | None]
    losses: list[list[float]]  # per rank: the loss of each piece, before weighting
    replayed_losses: list[list[float]] | None  # by the reference; None where it cannot replay a shard alone
    local: list[Digests]  # per rank: weighted local gradients
    replayed_local: list[Digests] | None
    local_excess: float | None  # worst excess ratio X where bits differ; None where they agree or it cannot be measured
    not_replayed: str  # why nothing was replayed; empty where it was
    reduced: list[Digests]  # per rank: gradients after the reduction, before clipping
    reduction_ratio: dict[str, float]  # tensor -> worst error of rank 0's reduced gradient by its bound (R4)
    exchange_ratio: NotRequired[dict[str, float]]  # synchronised layer -> worst error of what a rank heard by its bound (R4)
    after: list[Digests]  # per rank: parameters and optimizer state after the step
    replayed_after: Digests | None
    buffers: list[Digests]  # per rank: buffers after the step
    replayed_buffers: list[Digests] | None
    movement: dict[str, list[bool]]  # tensor -> [has a gradient, not zero, can move by it, moved, the replay moved it]
    loss: Sums


class Mathematics(TypedDict):
    """R7 and R8: against the whole global batch in one process, with dropout switched off on both sides."""

    step: int
    ratios: dict[str, float]  # R7: tensor -> norm(d) / (1e-11 max(norm(g_i), 1e-3 norm(g))); R8: tensor -> excess ratio X
    loss_error: float  # of the loss: relative, in units of round-off u; by what one process makes of other orders, if more


class Schedule(TypedDict):
    """R5: the learning rates of the first ``steps`` steps; the rest says where a rank's are not those that one process has."""

    steps: int
    step: NotRequired[int]
    rank: NotRequired[int]
    lr: NotRequired[list[float]]  # of each parameter group
    declared: NotRequired[list[float]]


class Readings(TypedDict):
    """R11: the same samples, read again and again with the common generators in the same state each time, on all ranks."""

    number: int
    digests: list[str]  # per rank: of all that it read
    changes: list[int]  # per rank: how often it read other than just before; 0 where the data set draws nothing by itself
    why_not: str  # why a rank could not read; empty where all could


class Evidence(TypedDict):
    """All of it."""

    format: int
    tier: str  # quick, full, audit
    nprocs: int
    precision: str
    deterministic: bool
    sync_bn: bool
    has_batch_norm: bool
    batch_norm_buffers: NotRequired[list[str]]  # and of InstanceNorm: each rank keeps those of its own batches, as is known
    synchronised: NotRequired[list[str]]  # buffers of synchronised layers, equal on all ranks; absent: all, with sync_bn
    data_goes_on: NotRequired[bool]  # the data set has generators of its own, which the verification has drawn from
    uses_random: bool  # a forward pass draws random numbers (dropout)
    find_unused_parameters: bool
    schedule: NotRequired[Schedule | None]
    comm_hook: NotRequired[str]  # how gradients are compressed, by declaration; absent: not at all
    asked_world_size: int
    shared_with: str  # evidence of another run, bit for bit the same, whose reference this is; empty where it has its own
    facts: list[dict[str, Any]]  # per rank, as in rank-N.jsonl (R0)
    uncovered: list[str]  # trainable parameters that no reduction covers (R0)
    partition: Partition
    readings: NotRequired[Readings | None]
    birth: list[Digests]  # per rank: parameters, buffers and optimizer state at step 0 (R2)
    reference_birth: Digests
    steps: list[StepEvidence]
    no_steps: NotRequired[str]  # why there are none
    float64: list[Mathematics] | None  # R7; None where it was not run
    own_precision: list[Mathematics] | None  # R8
    not_mathematics: str  # why R7 and R8 were not run; empty where they were
    evaluation: dict[str, list[float]] | None  # name -> [sum, count] as reported (R9); None without evaluation
    reference_evaluation: dict[str, list[float]] | None
    evaluated_again: NotRequired[list[dict[str, list[float]]] | None]  # the reference with other random draws
    observed_twice: list[list[Digests]] | None  # R13, full: per step, rank 0's state after it, with capture and without

"""The faults as data: their names, what each is, and which check must catch it. Free of torch, for the parent."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: In the published table.
        name: As typed after ``fault=``.
        what: Is wrong in a run with it.
        checks: The checks that name it, one of which must be the first to turn red.
        size: The smallest that must be caught; None where it depends on the precision, or there is no size.
        unit: Of the size; empty where the fault has none.
        least_ranks: It can be injected into.
    """

    number: int
    name: str
    what: str
    checks: tuple[str, ...]
    size: float | None = None
    unit: str = ""
    least_ranks: int = 2


_LOCAL = ("R3", "R7", "R8")
"""R7 or R8 stands in for R3 where a shard cannot be replayed alone, and for steps that are not replayed."""

_TABLE = (
    Fault(1, "last_bias_not_reduced", "each rank keeps its own gradient of the last bias", ("R4", "R6")),
    Fault(2, "rank0_value_everywhere", "one tensor has rank 0's gradient on all ranks, not the mean", ("R4",)),
    Fault(3, "sum_instead_of_mean", "gradients are added over ranks, and not divided by their number", ("R4", "R7")),
    Fault(4, "divided_twice", "gradients are divided by the number of ranks twice", ("R4", "R7")),
    Fault(5, "unequal_shards_averaged_equally", "a shard of fewer samples or tokens counts as much as another", _LOCAL),
    Fault(6, "not_sharded", "every rank takes the whole global batch", ("R1",)),
    Fault(7, "one_sample_twice", "rank 1 takes a sample of rank 0's in place of its own", ("R1",), 1, "id an epoch"),
    Fault(8, "last_batch_dropped", "the last batch of an epoch is left out", ("R1",), least_ranks=1),
    Fault(9, "sample_of_another_batch", "rank 1 takes a sample of the next batch, and gives its own for it", ("R1",)),
    Fault(10, "epoch_not_set", "every epoch has the order of the first", ("R1",), least_ranks=1),
    Fault(11, "not_synchronised_at_birth", "each rank starts from parameters of its own", ("R2",)),
    Fault(12, "one_ulp_at_birth", "one number of rank 1's first parameter is the next representable one", ("R2",), 1, "ulp"),
    Fault(13, "stale_buffers", "BatchNorm's statistics lag behind on rank 1", ("R6", "R11"), 1, "ulp of one number"),
    Fault(14, "no_sync_left_on", "gradients are not reduced in the second step", ("R4", "R6"), 1, "step"),
    Fault(15, "each_process_alone", "no process has joined the group: each trains alone, in a world of 1", ("R0",)),
    Fault(16, "accumulation_without_divisor", "gradients are sums over a step's pieces, not means", _LOCAL, least_ranks=1),
    Fault(17, "zero_grad_forgotten", "each step's gradients are added to those of the step before", _LOCAL, least_ranks=1),
    Fault(18, "stale_bucket", "the tensors that are reduced first have the gradients of the step before", ("R4",)),
    Fault(19, "lr_times_ranks", "the learning rate is multiplied by the number of ranks", ("R5",), None, "relative"),
    Fault(20, "scheduler_stepped_by_each_rank", "the scheduler takes a step for every rank in each step", ("R5",)),
    Fault(21, "lr_off_on_one_rank", "the learning rate of rank 1 is larger", ("R5",), 2e-7, "relative"),
    Fault(22, "weight_decay_on_one_rank", "one tensor of rank 1 decays a little in each step", ("R5", "R6"), None, "relative"),
    Fault(23, "parameter_not_in_optimizer", "the optimizer does not know the last parameter", ("R5", "R14"), least_ranks=1),
    Fault(24, "clipped_before_reduction", "each rank clips its own gradient before the reduction", _LOCAL),
    Fault(25, "bf16_compression", "gradients travel in bfloat16", ("R4", "R7")),
    Fault(26, "fp16_compression", "gradients travel in float16", ("R4", "R7")),
    Fault(27, "momentum_lost", "the optimizer's state is empty before the second step", ("R5",), least_ranks=1),
    Fault(28, "one_rank_skips_a_step", "rank 1 leaves out the optimizer's second step", ("R5",), 1, "step"),
    Fault(29, "rank0_loss_reported", "every rank reports rank 0's loss", ("R9",)),
    Fault(30, "sparse_rows_lost", "rows of sparse gradients that only rank 1 has are lost", ("R4",), 1, "row"),
    Fault(31, "one_gradient_scaled", "the reduced gradient of one tensor is too large", ("R4", "R7"), None, "relative"),
    Fault(32, "bit_flipped_in_compute", "one bit of one local gradient is flipped on rank 1", ("R3",), 0, "bit"),
    Fault(33, "bit_flipped_on_wire", "one bit is flipped in what rank 1 sends", ("R4",), 3, "bit"),
    Fault(34, "bit_flipped_after_sum", "one bit of a reduced gradient is flipped on rank 1", ("R4", "R6"), 0, "bit"),
    Fault(35, "same_dropout_everywhere", "all ranks draw the same dropout masks", ("R11",)),
    Fault(36, "accuracy_as_mean_of_means", "metrics are means of the ranks' means", ("R9",)),
)

FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _TABLE}


# A protocol, because the plan's own module imports this one.
class Settings(Protocol):
    """What of a training's plan decides whether a fault can be injected."""

    @property
    def fault(self) -> str | None: ...  # noqa: D102
    @property
    def fault_size(self) -> float | None: ...  # noqa: D102
    @property
    def compare(self) -> str: ...  # noqa: D102
    @property
    def clip_norm(self) -> float | None: ...  # noqa: D102
    @property
    def grad_accumulation(self) -> int: ...  # noqa: D102
    @property
    def epochs(self) -> int | None: ...  # noqa: D102


def problems(plan: Settings, nprocs: int) -> list[str]:
    """Return a sentence for each reason why the plan's fault cannot be injected; ranks may know more of them."""
    name = plan.fault
    if name is None:
        return []
    if name not in FAULTS:
        # 0.4, where 0.6 is usual: the names are long, and remembered in part.
        close = difflib.get_close_matches(name, FAULTS, 1, 0.4)
        hint = f"did you mean fault={close[0]}?" if close else "python run.py --help lists them."
        return [f"fault={name} is unknown; {hint}"]
    found = [sentence for wrong, sentence in _checks(plan, FAULTS[name], nprocs) if wrong]
    if plan.compare == "audit":
        found.append(f"compare=audit injects every fault by itself: leave out fault={name}, or use compare=full.")
    return found


def _checks(plan: Settings, fault: Fault, nprocs: int) -> list[tuple[bool, str]]:
    name, size = fault.name, plan.fault_size
    return [
        (
            nprocs < fault.least_ranks,
            f"fault={name} is a fault between ranks, and nprocs={nprocs}. Use nprocs={fault.least_ranks} or more.",
        ),
        (
            size is not None and not fault.unit,
            f"fault.size={size} has no meaning for fault={name}, which has no size. Leave it out.",
        ),
        (
            size is not None and bool(fault.unit) and not _is_size(fault, size),
            f"fault.size={size} is not a size of fault={name} ({fault.unit}): it is {_least(fault)}.",
        ),
        (
            name == "clipped_before_reduction" and plan.clip_norm is None,
            f"fault={name} needs clipping, and clip_norm=null. Use clip_norm=1.0, or what cuts something off.",
        ),
        (
            name == "accumulation_without_divisor" and plan.grad_accumulation < 2,
            f"fault={name} needs accumulation, and grad_accumulation=1. Use grad_accumulation=2 or more.",
        ),
        (
            # With steps in place of epochs, the ranks alone see whether a second one begins.
            name == "epoch_not_set" and plan.epochs == 1,
            f"fault={name} needs a second epoch, and epochs=1. Use epochs=2 or more.",
        ),
    ]


def _is_size(fault: Fault, size: float) -> bool:
    # int() raises on what is not finite.
    if not math.isfinite(size):
        return False
    if fault.unit == "relative":
        return size > 0
    if fault.unit == "bit":
        # float64 is the widest type that is trained, and has 64 bits.
        return size == int(size) and 0 <= size < 64
    return size == int(size) and size >= 1


def _least(fault: Fault) -> str:
    if fault.unit == "relative":
        return "a number above 0"
    return f"a whole number from {0 if fault.unit == 'bit' else 1} on"

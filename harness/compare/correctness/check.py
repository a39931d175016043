"""Check: what one check came to; and what each is about, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "not checked"]
# Printed beside each threshold: a reader may trust a theorem, a measured value and a declared one differently.
Origin = Literal["bits", "theorem", "measured", "declared"]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: ``R0`` to ``R14``.
        title: What it is about, in a word or two.
        status: ``not checked`` has its reason in ``detail``.
        quantity: The worst value that was seen; None where bits or whole sets were compared.
        threshold: What it may be at most.
        origin: Of the threshold: ``bits`` (exactly equal), ``theorem``, ``measured`` or ``declared``.
        detail: What was compared, or why not; for a red check, what was seen.
        where: For a red check, step, rank, stage and tensor of the first thing wrong, as far as they are known.
        causes: For a red check, what usually causes it.
    """

    name: str
    title: str
    status: Status
    quantity: float | None = None
    threshold: float | None = None
    origin: Origin = "bits"
    detail: str = ""
    where: Mapping[str, str | int] | None = None
    causes: str = ""

    def sentence(self) -> str:
        """Return the check in words, such as ``R4 (reduction) is red at step 0, rank 1, tensor fc2.bias: ...``."""
        if self.status == "passed":
            return f"{self.name} ({self.title}) is green: {self.detail}."
        if self.status == "not checked":
            return f"{self.name} ({self.title}) was not checked: {self.detail}."
        return f"{self.name} ({self.title}) is red{self._place()}: {self.detail}. Usual causes: {self.causes}."

    def _place(self) -> str:
        where = {key: value for key, value in (self.where or {}).items() if key != "stage" or value != _STAGES.get(self.name)}
        # A stage is a name by itself; numbers need to be told of what they are.
        parts = [str(value) if key == "stage" else f"{key} {value}" for key, value in where.items()]
        return f" at {', '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class Mismatch:
    """One thing that is wrong.

    Attributes:
        seen: What it is, in words, without a full stop.
        stage: Of the step, in causal order: ``ids``, ``batch``, ``rng``, ``state before``, ``activation``, ``loss``,
            ``local gradient``, ``reduced gradient``, ``lr``, ``state after``, ``buffers``; or what else was looked at.
        quantity: Where a number was compared; NaN compares as wrong.
        threshold: Of this number, where it is not the check's usual one.
        extra: Further places, such as ``{"epoch": 1, "id": 17}``.
    """

    seen: str
    stage: str
    step: int | None = None
    rank: int | None = None
    tensor: str | None = None
    quantity: float | None = None
    threshold: float | None = None
    extra: Mapping[str, str | int] | None = None

    def where(self) -> dict[str, str | int]:
        """Return the place, without what is not known."""
        # In the order in which one looks for it.
        known = {"step": self.step, "rank": self.rank, "stage": self.stage, "tensor": self.tensor, **(self.extra or {})}
        return {key: value for key, value in known.items() if value is not None}

    def place(self) -> str:
        """Return the place in words: ``step 0, rank 1, stage buffers, tensor bn.running_mean``."""
        return ", ".join(f"{key} {value}" for key, value in self.where().items())


class Incomplete(ValueError):
    """Evidence that lacks what it should hold: nothing can pass on it."""


@dataclass(frozen=True)
class _About:
    title: str
    origin: Origin
    threshold: float | None
    causes: str


_ABOUT: Mapping[str, _About] = {
    "R0": _About(
        "contract", "bits", None,
        "a rank did not join the group and trains alone (world size 1), two ranks share a device, a rank runs with other "
        "flags, threads or versions, or a parameter was replaced after wrapping",
    ),
    "R1": _About(
        "partition", "bits", 0,
        "the data is not sharded, shards overlap, the last batch is dropped or padded with duplicates, the epoch is not "
        "set, so that each one has the same order, or dataset() differs by rank",
    ),
    "R2": _About(
        "birth", "bits", None,
        "rank 0's parameters were not sent to the other ranks, the seed was set after the model was built, or a copy went "
        "through a narrower type",
    ),
    "R3": _About(
        "local replay", "bits", None,
        "the loss is scaled, gradient accumulation lacks its divisor, gradients were not set to zero, clipping comes before "
        "the reduction, the model is in evaluation mode, another number of threads, recipe or model keep state outside of "
        "buffers or do something else by rank, or a faulty device",
    ),
    "R4": _About(
        "reduction", "theorem", 1,
        "a tensor is not reduced, the sum is taken for the mean, the mean is divided by the number of ranks again, a bucket is "
        "one step old, no_sync or compression was left on, or bits were lost on the wire",
    ),
    "R5": _About(
        "update", "bits", None,
        "the learning rate is scaled, the scheduler steps more than once a step, a parameter is missing in the optimizer, a "
        "step was skipped, momentum was lost, gradients are clipped at another place, the optimizer differs by rank, draws "
        "random numbers or asks for the number of ranks, or forward changes weights by what a rank sees",
    ),
    "R6": _About(
        "ranks", "bits", None,
        "one rank got an update, a setting or a random number that the others did not, or forward changes weights by what a "
        "rank sees: the ranks drift apart",
    ),
    "R7": _About(
        "mathematics", "declared", 1,
        "shards of unequal size are averaged as if they were equal, losses of tokens are normalised on each rank, the "
        "divisor is wrong, loss() of the recipe returns a sum, where it must return the mean or (sum, count), or asks for the "
        "number of ranks, or the loss or a layer looks across the samples of a batch (pairs, statistics), of which a rank has "
        "only its part",
    ),
    "R8": _About(
        "precision", "measured", 4,
        "loss() of the recipe returns a sum, where it must return the mean or (sum, count), draws random numbers or asks for "
        "the number of ranks; a hook changes gradients by what a rank sees; the loss or a layer looks across the samples of a "
        "batch (pairs, statistics), of which a rank has only its part; or mixed precision, TF32 or a reduction in 16 bits "
        "loses more than one process in the same precision does",
    ),
    "R9": _About(
        "report", "declared", 1e-12,
        "rank 0's loss is reported for all, means of unequal shards are averaged, or padding is counted",
    ),
    "R10": _About(
        "launcher", "bits", None,
        "threads, seeds, the order of ranks or the start method leak into the training",
    ),
    "R11": _About(
        "buffers and RNG", "bits", None,
        "BatchNorm's statistics or settings on a rank are not the others', ranks draw the same dropout masks, or a generator "
        "of the data set's own is seeded alike on all ranks",
    ),
    "R12": _About(
        "resume", "bits", None,
        "the state of optimizer, scheduler, sampler or random generators is not saved, or not restored, or the training has "
        "state elsewhere: in a buffer that is not persistent, an attribute, the data set",
    ),
    "R13": _About(
        "observer", "bits", None,
        "a kernel is not deterministic (deterministic=false then compares within noise), state that outlives a training's end "
        "(in a class, a module, the data set), or watching the run changes it",
    ),
    "R14": _About(
        "movement", "bits", None,
        "a tensor was frozen by mistake, a branch was detached, or a parameter is not in the optimizer",
    ),
}  # fmt: skip

_STAGES = {
    "R0": "contract", "R1": "ids", "R2": "birth", "R4": "reduced gradient", "R7": "gradient", "R8": "gradient",
    "R9": "evaluation", "R13": "state after", "R14": "movement",
}  # fmt: skip
"""The stage that a check is about anyway, so that its sentence need not name it."""

NOT_DETERMINISTIC = "kernels are not deterministic (deterministic=false)"


def passed(name: str, detail: str, quantity: float | None = None, *, within: tuple[Origin, float] | None = None) -> Check:
    """Return a green check; ``within`` is origin and threshold where they are not the usual ones."""
    about = _ABOUT[name]
    origin, threshold = within or (about.origin, about.threshold)
    return Check(name, about.title, "passed", quantity, threshold, origin, detail)


def failed(name: str, mismatch: Mismatch, *, within: tuple[Origin, float] | None = None) -> Check:
    """Return a red check for the first thing wrong."""
    about = _ABOUT[name]
    origin, usual = within or (about.origin, about.threshold)
    # A check may hold several quantities against bounds of their own, as R8 does its loss and its gradients.
    threshold = usual if mismatch.threshold is None else mismatch.threshold
    where = mismatch.where()
    return Check(name, about.title, "failed", mismatch.quantity, threshold, origin, mismatch.seen, where, about.causes)


def not_checked(name: str, reason: str) -> Check:
    """Return a check that says nothing, with the reason."""
    about = _ABOUT[name]
    return Check(name, about.title, "not checked", None, about.threshold, about.origin, reason)


def incomplete(name: str, reason: str) -> Check:
    """Return a red check for evidence that lacks what it should hold: that is never taken for a reason."""
    about = _ABOUT[name]
    causes = "the evidence was cut short, edited, or written by another version of the harness"
    # By this stage the verdict puts it before all steps: what cannot be read may hide a fault of any of them.
    where: dict[str, str | int] = {"stage": "evidence"}
    return Check(name, about.title, "failed", None, about.threshold, about.origin, reason, where, causes)


def settle(name: str, mismatches: Iterable[Mismatch], deterministic: bool, detail: str) -> Check:
    """Return the check of two runs that must have the same bits; without deterministic kernels a difference accuses nobody."""
    first = next(iter(mismatches), None)
    if first is not None and not deterministic:
        # Not green either: the difference may be a fault, and nothing here tells it from noise.
        return not_checked(name, f"{NOT_DETERMINISTIC}, and two runs differ ({first.place()})")
    return conclude(name, filter(None, (first,)), detail)


def conclude(
    name: str,
    mismatches: Iterable[Mismatch],
    detail: str,
    quantity: float | None = None,
    *,
    within: tuple[Origin, float] | None = None,
) -> Check:
    """Return a red check for the first of ``mismatches``, which come in causal order, or a green one without any."""
    # Only the first is computed: mismatches come from generators, and the rest of a broken run says nothing more.
    first = next(iter(mismatches), None)
    return passed(name, detail, quantity, within=within) if first is None else failed(name, first, within=within)

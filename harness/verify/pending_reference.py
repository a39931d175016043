"""The reference of a verification, made when it is first asked for: evidence of an earlier run may make it needless."""

from __future__ import annotations

from torch import nn

from harness.errors import Mismatch
from harness.training.parallel.collectives import described_tensors, difference
from harness.verify.reference.reference import Reference
from harness.verify.start_evidence import Start
from harness.verify.subject import Subject


class PendingReference:
    """Makes the reference of some ranks, once, and sees to it that it trains what they train; on rank 0.

    Args:
        subject: What the ranks train.
        start: How they begin.
        ranks_model: Of one of them.
    """

    def __init__(self, subject: Subject, start: Start, ranks_model: nn.Module) -> None:
        self._subject = subject
        self._start = start
        self._ranks_model = ranks_model
        # As it is now: what steps make of it, buffers of another shape say, one process does not have at birth.
        self._described = described_tensors(ranks_model)
        self._reference: Reference | None = None

    @property
    def is_made(self) -> bool:
        """Whether anybody has asked for it."""
        return self._reference is not None

    def get(self) -> Reference:
        """Return the reference.

        Raises:
            Mismatch: The recipe makes another training for one process.
        """
        if self._reference is None:
            seat, start = self._subject.seat, self._start
            reference = Reference(self._subject.plan, seat.world_size, seat.device, start.num_steps, self._ranks_model)
            # Before anything is compared: bits of another model would accuse the ranks of what the recipe did.
            # Models first: of another one no other difference means anything.
            self._require_same_model(reference)
            self._require_same_samples(reference)
            # Kept only when it was found to be the same: whoever asks again is told again.
            self._reference = reference
        return self._reference

    def _require_same_model(self, reference: Reference) -> None:
        alone = described_tensors(reference.process.model)
        if alone != self._described:
            differing = difference(alone, self._described, "one process", "the ranks")
            ranks = self._subject.seat.world_size
            raise Mismatch(f"model() makes another model for one process than for {ranks} ranks: {differing}.")

    def _require_same_samples(self, reference: Reference) -> None:
        """See to it that one process has the samples of the ranks, in the same batches.

        Raises:
            Mismatch: It has not: dataset() or batches() of the recipe asks for the number of ranks.
        """
        ranks, own, start = self._subject.seat.world_size, reference.process.num_samples, self._start
        if own != start.num_samples:
            raise Mismatch(f"dataset() has {own} samples for one process, and {start.num_samples} for {ranks} ranks.")
        # A recipe may group by the number of ranks: equal samples then make other batches.
        if any(reference.process.batches(epoch) != batches for epoch, batches in enumerate(start.own_batches)):
            raise Mismatch(f"batches() makes other global batches for one process than for {ranks} ranks.")

"""What goes into a replay of a rank's step, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from harness.errors import HarnessError
from harness.training.digest import Digests
from harness.training.parallel.batchnorm_messages import Exchanged
from harness.verify.rounding import Gradients


class Unrepeatable(HarnessError):
    """What the ranks do cannot be done again by one process; the text says why."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of a global batch, and what else went into its step.

    Attributes:
        pieces: Sample numbers, a list for each backward.
        global_size: Samples in the global batch.
        random: The rank's generators before it loaded its samples.
        loaded: The batches as the rank loaded them, where they cannot be loaded again; None to load them.
        exchanged: What synchronised layers of the rank told and heard.
    """

    pieces: Sequence[Sequence[int]]
    global_size: int
    random: Mapping[str, Any]
    loaded: Sequence[Any] | None
    exchanged: Sequence[Exchanged] = ()


@dataclass(frozen=True)
class Replayed:
    """What one shard came to in the reference.

    Attributes:
        losses: Of each piece, before weighting.
        counts: Samples or items of each piece.
        gradients: Weighted as the run's are.
        buffers: After the pieces.
        batch: Digest of the samples that it loaded.
        drew_random: True where forward drew random numbers.
        exchanged: What its synchronised layers told, and what the rank itself had heard.
        activations: Module -> digest of what it returned, in that order; of a full verification.
        rewritten: Parameters that forward itself has changed (a mean of others, a bound), as it left them.
    """

    losses: list[float]
    counts: list[float]
    gradients: Gradients
    buffers: Digests
    batch: str
    drew_random: bool
    exchanged: list[Exchanged]
    activations: Digests
    rewritten: Mapping[str, Tensor]


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradient of each trainable parameter by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

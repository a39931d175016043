"""What synchronised layers of all ranks tell each other of their batches, and how it is recorded and replayed.

A replay of one rank alone takes from the record what the others told it: so each rank can be checked by itself, and then what
they told against what each has really computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from harness.errors import HarnessError
from harness.training.parallel.collectives import all_gather, world_size


class Layer(Protocol):
    """A layer that exchanges, with the process group in which it does; None is the default one."""

    group: ProcessGroup | None


class Exchange(Protocol):
    """A way to tell the other ranks, and to hear from them. ``layer`` is who asks."""

    def num_ranks(self, layer: Layer) -> int:
        """Return how many ranks there are."""

    def gather(self, values: Tensor, layer: Layer) -> Tensor:
        """Return every rank's values of shape (K,), in rank order: shape (ranks, K)."""

    def total(self, values: Tensor, layer: Layer) -> Tensor:
        """Return the sum of every rank's values, of any one shape."""


class Collective:
    """The process group."""

    def num_ranks(self, layer: Layer) -> int:
        """Return the size of the layer's group."""
        return world_size(layer.group)

    def gather(self, values: Tensor, layer: Layer) -> Tensor:
        """Return every rank's values."""
        return torch.stack(all_gather(values, layer.group))

    def total(self, values: Tensor, layer: Layer) -> Tensor:
        """Return the sum over ranks."""
        # all_reduce writes into what it is given, and a record keeps what was told.
        total = values.clone()
        dist.all_reduce(total, group=layer.group)
        return total


class OneProcess:
    """One process that has nobody to tell."""

    def num_ranks(self, layer: Layer) -> int:
        """Return 1."""
        return 1

    def gather(self, values: Tensor, layer: Layer) -> Tensor:
        """Return its own values."""
        return values.unsqueeze(0)

    def total(self, values: Tensor, layer: Layer) -> Tensor:
        """Return its own values."""
        return values


@dataclass(frozen=True)
class Exchanged:
    """One exchange, as one rank saw it: what it told, and what it heard.

    Attributes:
        is_sum: Whether it heard the sum; otherwise it heard each rank's, in rank order.
    """

    layer: str
    is_sum: bool
    told: Tensor
    heard: Tensor


class Recording:
    """The way that was in use, with a record of what goes through it."""

    def __init__(self, model: nn.Module) -> None:
        self.record: list[Exchanged] = []
        # By identity, because a layer does not know its own name.
        self._names = {id(layer): name for name, layer in model.named_modules()}
        # At birth, when this one is not in use yet: later it would ask itself.
        self._inner = current()

    def num_ranks(self, layer: Layer) -> int:
        """Return the size of the layer's group."""
        return self._inner.num_ranks(layer)

    def gather(self, values: Tensor, layer: Layer) -> Tensor:
        """Return every rank's values, and keep them."""
        return self._keep(layer, False, values, self._inner.gather(values, layer))

    def total(self, values: Tensor, layer: Layer) -> Tensor:
        """Return the sum over ranks, and keep it."""
        return self._keep(layer, True, values, self._inner.total(values, layer))

    def _keep(self, layer: Layer, is_sum: bool, told: Tensor, heard: Tensor) -> Tensor:
        self.record.append(Exchanged(self._names.get(id(layer), ""), is_sum, told.detach().clone(), heard.detach().clone()))
        return heard


class Replaying:
    """Another process's record: one hears what that one heard, whatever one tells.

    Attributes:
        record: The exchanges so far, with what this process told.
    """

    def __init__(self, recorded: Sequence[Exchanged], num_ranks: int) -> None:
        self.record: list[Exchanged] = []
        self._recorded = list(recorded)
        self._num_ranks = num_ranks

    def num_ranks(self, layer: Layer) -> int:
        """Return how many ranks there were."""
        return self._num_ranks

    def gather(self, values: Tensor, layer: Layer) -> Tensor:
        """Return what was heard next."""
        return self._next(False, values)

    def total(self, values: Tensor, layer: Layer) -> Tensor:
        """Return what was heard next."""
        return self._next(True, values)

    def _next(self, is_sum: bool, told: Tensor) -> Tensor:
        number = len(self.record)
        known = self._recorded[number] if number < len(self._recorded) else None
        # The kind and shape alone: what is told differs where a rank was wrong, and that is for R4 to say.
        if known is None or known.is_sum != is_sum or known.told.shape != told.shape:
            raise HarnessError(
                f"the replay of a step comes to exchange number {number} of synchronised layers, which the run did not have: "
                "does forward depend on more than the model's state, its batch and torch's random numbers?"
            )
        self.record.append(Exchanged(known.layer, is_sum, told.detach().clone(), known.heard))
        # Whoever hears it may change it in place, and the record is to stay.
        return known.heard.clone()


_current: list[Exchange] = [Collective()]
"""The last one is in use. Not a context variable: backward may run in threads of torch's."""


def current() -> Exchange:
    """Return the way that is in use."""
    return _current[-1]


@contextmanager
def exchanging(by: Exchange) -> Iterator[None]:
    """Have synchronised layers exchange by these means."""
    _current.append(by)
    try:
        yield
    finally:
        _current.pop()

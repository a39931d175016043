"""The BatchNorm layers of a rank's model: what one process can do in their place, and what it cannot."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.training.parallel.batchnorm import SyncBatchNorm, group_of
from harness.training.parallel.collectives import world_size

NEEDS_PEERS = "torch.nn.SyncBatchNorm asks the other ranks (sync_bn=true puts in its place what can be replayed)"
IN_SUBGROUPS = "a BatchNorm layer is synchronised among some of the ranks, and one process has no such group"
SCRIPTED = "BatchNorm in a scripted module cannot be held to its running statistics"
MIXED = "some BatchNorm layers are synchronised and others are not, which one process cannot do"


class BatchNorms:
    """The BatchNorm layers of a rank's model, which tells which of them are synchronised."""

    def __init__(self, ranks_model: nn.Module, num_ranks: int) -> None:
        self._layers = {name: layer for name, layer in ranks_model.named_modules() if isinstance(layer, _BatchNorm)}
        self._num_ranks = num_ranks

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self._layers)

    @property
    def synchronised(self) -> list[str]:
        """The names of the harness's own synchronised layers."""
        return [name for name, layer in self._layers.items() if isinstance(layer, SyncBatchNorm)]

    @property
    def has_local_statistics(self) -> bool:
        """Whether some normalise each rank's batch by itself."""
        return any(not isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) for layer in self._layers.values())

    @property
    def why_not_alone(self) -> str:
        """Why one process cannot replay a rank, whose model asks other ranks; empty where it can."""
        # A single rank is one process, and even torch's layer asks nobody then.
        if self._num_ranks == 1:
            return ""
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self._layers.values()):
            return NEEDS_PEERS
        groups = [group_of(layer) for layer in self._layers.values()]
        return IN_SUBGROUPS if any(world_size(group) != self._num_ranks for group in groups if group is not None) else ""

    def why_not_whole(self, model: nn.Module) -> str:
        """Return why the whole batch in one process is not what the ranks do together; empty where it is."""
        # A scripted module has a class of its own, and keeps only the name of the one that it was made of.
        if any("BatchNorm" in getattr(layer, "original_name", "") for layer in model.modules()):
            return SCRIPTED
        # The batch would have to go through at once for some, and piece by piece for the others.
        if len({isinstance(layer, SyncBatchNorm) for layer in self._layers.values()}) == 2:
            return MIXED
        return self.why_not_alone

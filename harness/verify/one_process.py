"""What ``torch.distributed`` says and does for code that asks it, while one process stands for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import _C
from torch.distributed import distributed_c10d as c10d

from harness.rank.group import joining
from harness.run.environment import RankEnvironment

_FIRST = count(1 << 20, 1 << 10)
"""Numbers of a world's first group: torch finds a group by its number, and counts those of its own world from 0."""


class _World(c10d._World):
    """All that torch knows of groups, which its own class keeps in the module, one for all worlds."""

    # torch's class has these seven as properties of globals of the module, and no public way to have two sets of them;
    # plain attributes here take their place. tests/test_one_process.py fails when torch has others.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}
        self.group_count = next(_FIRST)


class WorldOfOne:
    """A ``torch.distributed`` in which this process is all there is, and the same in the environment.

    Whatever asks in whatever way hears rank 0 of 1, and collectives do what they do in one process. Its groups last as long as
    this object: what a model has made at its birth works in its loss. Without a process group only the environment changes.
    """

    def __init__(self) -> None:
        self._world: _World | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have all code of this process be alone meanwhile."""
        with _environment_of_one():
            if not (dist.is_available() and dist.is_initialized()):
                yield
                return
            # Made once and kept: a group that the model has made at its birth is found again in its loss.
            if self._world is None:
                self._world = _world_of_one()
            with _shown(self._world):
                yield


@contextmanager
def _environment_of_one() -> Iterator[None]:
    # Only those that are set: code may also ask whether there are any.
    variables = {name: value for name, value in RankEnvironment().variables().items() if name in os.environ}
    before = {name: os.environ[name] for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def _shown(world: _World) -> Iterator[None]:
    """Have torch take all that it knows of groups from ``world``: torch calls its own an extension point to override."""
    # A private name, but each public function of torch.distributed looks it up there when it is called.
    before = c10d._world
    c10d._world = world
    try:
        yield
    finally:
        c10d._world = before


def _world_of_one() -> _World:
    backend, hook, world = dist.get_backend(), sys.excepthook, _World()
    # A store in memory has no public name, and a group of one needs no port for it.
    with _shown(world), joining(one_machine=True):
        dist.init_process_group(backend, store=_C._distributed_c10d.HashStore(), rank=0, world_size=1)
    # init_process_group puts one of torch's in its place.
    sys.excepthook = hook
    return world


_ASKED = (
    *("_allgather_base", "_get_backend", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "reduce_scatter_single", "reduce_scatter_single_coalesced", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier"),
    *("broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)
"""Methods by which collectives reach a group, private ones too: one that torch adds would fail in it, and not be refused."""


@contextmanager
def unanswered(num_ranks: int, refuse: Callable[..., Any]) -> Iterator[None]:
    """Have code hear that it is rank 0 of ``num_ranks``, and call ``refuse`` where it asks the others, in whatever way."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    backend, world = dist.get_backend(), _World()
    name: Any = str(world.group_count)
    kind = type("Unanswered", (dist.ProcessGroup,), {**dict.fromkeys(_ASKED, refuse), "group_name": name})
    group = kind(0, num_ranks)
    world.default_pg = group
    world.pg_map[group] = (backend, None)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(num_ranks)}
    world.pg_backend_config[group] = backend
    # Functional collectives find a group by its name in a private registry of C++, in which init_process_group enters its own.
    _C._distributed_c10d._register_process_group(name, group)
    new_group = dist.new_group
    # A new group takes a store, and this world has none.
    dist.new_group = refuse
    try:
        with _shown(world):
            yield
    finally:
        dist.new_group = new_group
        _C._distributed_c10d._unregister_process_group(name)

"""What code hears that asks who it is, and the others, while one process stands for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.testing._internal.distributed.fake_pg  # registers a backend of as many ranks as one asks for
from torch.distributed import (
    all_gather_object,
    all_reduce,
    barrier,
    broadcast_object_list,
    distributed_c10d,
    get_rank,
    get_world_size,
)

from harness.rank.group import joining, leave_group
from harness.verify.one_process import _ASKED, WorldOfOne, _World, unanswered


@pytest.fixture
def rank_3_of_8(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    dist.init_process_group("fake", store=dist.HashStore(), rank=3, world_size=8)
    yield
    leave_group()


def heard() -> tuple[Any, ...]:
    """Return what is heard by names that were bound before, by attributes, by the group, and from the environment."""
    return get_rank(), get_world_size(), dist.get_world_size(), dist.group.WORLD.size(), os.environ["WORLD_SIZE"]


def test_one_of_one_is_heard_in_whatever_way(rank_3_of_8: None) -> None:
    group = dist.group.WORLD
    with pytest.raises(KeyError), WorldOfOne().entered():
        assert heard() == (0, 1, 1, 1, "1")
        assert "LOCAL_RANK" not in os.environ
        raise KeyError
    assert heard() == (3, 8, 8, 8, "8") and dist.group.WORLD is group and os.environ["RANK"] == "3"


def test_collectives_of_one_do_what_they_do_in_one_process() -> None:
    with joining(one_machine=True):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world, values = WorldOfOne(), torch.ones(2)
        with world.entered():
            group = dist.new_group()
        with world.entered():
            all_reduce(values, group=group)
            barrier()
            assert (functional.all_reduce(values, "sum", dist.group.WORLD) + 0).tolist() == [1, 1]
            gathered = [None]
            all_gather_object(gathered, "mine")
        assert gathered == ["mine"] and values.tolist() == [1, 1]
        all_reduce(values)
        assert (functional.all_reduce(values, "sum", dist.group.WORLD) + 0).tolist() == [1, 1]
    finally:
        leave_group()


def test_a_rank_without_the_others_is_refused_what_asks_them(rank_3_of_8: None) -> None:
    class Refused(Exception):
        pass

    def refuse(*_: Any, **__: Any) -> None:
        raise Refused

    values = torch.ones(2)
    asking = {
        "all_reduce": lambda: all_reduce(values),
        "barrier": barrier,
        "an object": lambda: broadcast_object_list([1], 0),
        "functional": lambda: functional.all_reduce(values, "sum", dist.group.WORLD) + 0,
    }
    with unanswered(5, refuse):
        assert heard()[:4] == (0, 5, 5, 5)
        for name, ask in asking.items():
            with pytest.raises(Refused):
                ask()
                pytest.fail(name)
        with pytest.raises(Refused):
            dist.new_group()
    assert heard() == (3, 8, 8, 8, "8")


def test_torch_keeps_of_groups_what_a_world_has_its_own_of() -> None:
    kept_in_module = {
        name
        for name, value in vars(distributed_c10d._World).items()
        if isinstance(value, property) and value.fget is not None
        # What it reads: an attribute of its own, or data of the module.
        if any(not callable(vars(distributed_c10d).get(read, len)) for read in value.fget.__code__.co_names)
    }
    assert kept_in_module == {name for name in vars(_World) if not name.startswith("__")}


def test_every_method_of_a_group_that_asks_others_is_refused() -> None:
    methods = {name for name in dir(dist.ProcessGroup) if "c10d::Work" in (getattr(dist.ProcessGroup, name).__doc__ or "")}
    assert methods - set(_ASKED) <= {"_end_coalescing", "_register_on_completion_hook"}
    assert set(_ASKED) <= set(dir(dist.ProcessGroup))


def test_a_torch_without_distributed_has_nothing_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with WorldOfOne().entered():
        assert torch.tensor(1) == 1

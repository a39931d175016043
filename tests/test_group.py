"""What code hears that asks who it is, while one process stands for all."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers a backend of as many ranks as one asks for

from harness.distributed import leave_group
from harness.exchange import as_one_process
from harness.group import world_size


def test_a_recipe_hears_that_it_is_one_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    dist.init_process_group("fake", store=dist.HashStore(), rank=3, world_size=8)
    try:
        with pytest.raises(KeyError), as_one_process():
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_rank(), dist.get_world_size()) == ("0", "1", 0, 1)
            assert world_size(None) == 8, "what the harness itself asks is answered truly"
            assert "LOCAL_RANK" not in os.environ
            raise KeyError
        assert (dist.get_rank(), dist.get_world_size(), os.environ["RANK"]) == (3, 8, "3")
    finally:
        leave_group()


def test_a_torch_without_distributed_has_nothing_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with as_one_process():
        assert torch.tensor(1) == 1 and world_size(None) == 1

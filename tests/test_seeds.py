"""Streams are equal for equal names, on every machine, and unrelated otherwise."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from harness.training.seeds import derive, epoch_order, seed_everything, seed_rank
from harness.training.state import random_states, set_random_states, undisturbed_random


def drawn() -> tuple[float, float, float]:
    """Return the next number of each generator."""
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


@pytest.fixture(autouse=True)
def _streams_of_other_tests_go_on() -> object:
    with undisturbed_random():
        yield


def test_a_seed_is_the_same_for_ever() -> None:
    assert derive(0, "model") == 5558024794847056428
    assert epoch_order(8, 0, 0) == [7, 5, 6, 0, 3, 4, 1, 2]


def test_seeds_fit_every_generator_and_differ() -> None:
    seeds = {derive(seed, name, number) for seed in (0, 1, 2**40) for name in ("rank", "order") for number in range(50)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive(1, 11) != derive(11, 1)


def test_all_generators_are_seeded() -> None:
    seed_everything(derive(7, "x"))
    first = drawn()
    seed_everything(derive(7, "x"))
    assert drawn() == first
    seed_everything(derive(8, "x"))
    assert not set(drawn()) & set(first)


def test_ranks_have_streams_of_their_own() -> None:
    seen = []
    for seed, rank, step in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 5), (0, 1, 5)]:
        seed_rank(seed, rank, step)
        seen.append(drawn())
    assert len({number for numbers in seen for number in numbers}) == 15
    seed_rank(0, 1)
    assert drawn() == seen[1]


def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch_alone() -> None:
    before = torch.get_rng_state()
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(map(tuple, orders))) == 4
    torch.manual_seed(1)
    assert epoch_order(50, 0, 0) == orders[0]
    torch.set_rng_state(before)
    assert epoch_order(1, 0, 0) == [0]
    assert epoch_order(0, 0, 0) == []


def test_states_can_be_gone_back_to() -> None:
    before = random_states()
    first = drawn()
    set_random_states(before)
    assert drawn() == first
    with pytest.raises(KeyError), undisturbed_random():
        drawn()
        raise KeyError
    second = drawn()
    set_random_states(before)
    drawn()
    assert drawn() == second

"""Digests: equal for equal contents, in whatever objects these lie, and different for the smallest difference."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy
import pytest
import torch

from harness.digest import optimizer_digests, value_digest
from harness.errors import ConfigError


class Plain:
    """An object with the default representation, which holds its address."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@dataclasses.dataclass
class Sample:
    image: Any
    name: str


def long_array(last: float = 0.0) -> numpy.ndarray[Any, Any]:
    """Return an array that numpy abbreviates, with this number in its middle."""
    array = numpy.zeros(5000)
    array[2500] = last
    return array


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (long_array, long_array(1e-300)),
        (lambda: numpy.float32(1), numpy.float64(1)),
        (lambda: Plain(long_array()), Plain(long_array(1e-300))),
        (lambda: Plain(torch.zeros(2)), Plain(torch.tensor([0.0, -0.0]))),
        (lambda: [Sample(torch.ones(3), "one")], [Sample(torch.ones(3), "two")]),
        (lambda: {"a", "b", "c"}, {"a", "b", "d"}),
        (lambda: Plain({(1, 2), (3, 4)}), Plain({(1, 2), (3, 5)})),
        (lambda: (1, 2.5, "x", None, True), (1, 2.5, "x", None, False)),
    ],
)
def test_contents_count_and_nothing_else(make, other):
    assert value_digest(make()) == value_digest(make())
    assert value_digest(make()) != value_digest(other)


def test_which_parts_are_one_object_does_not_count():
    part = [1, 2]
    assert value_digest(Plain([part, part])) == value_digest(Plain([[1, 2], [1, 2]]))


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(ConfigError, match="There is no digest of a lock"):
        value_digest([torch.zeros(1), Plain(threading.Lock())])


def test_what_holds_itself_is_refused():
    turning = Plain(None)
    turning.inner = turning
    with pytest.raises(ConfigError, match="There is no digest of a list in which an object holds itself"):
        value_digest([turning])


def test_plain_state_of_an_optimizer_keeps_its_value():
    assert optimizer_digests({0: {"step": 3, "rate": 0.1}}) == {"optimizer.0.step": "3", "optimizer.0.rate": "0.1"}

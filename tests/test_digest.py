"""Digests: equal for equal contents, in whatever objects these lie, and different for the smallest difference."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy
import pytest
import torch

from harness.errors import ConfigError
from harness.training.digest import gradient_digest, optimizer_digests, tensor_digest, value_digest


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


def test_a_conjugate_or_negative_view_has_the_digest_of_its_values():
    values = torch.fft.fft(torch.arange(4.0))
    for view in (values.conj(), values.conj().imag):
        assert tensor_digest(view) == tensor_digest(view.resolve_conj().resolve_neg().clone())
    assert tensor_digest(values.conj()) != tensor_digest(values)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_a_compressed_sparse_tensor_has_a_digest_of_indices_and_values(layout):
    def compressed(dense: torch.Tensor) -> torch.Tensor:
        block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        return dense.to_sparse(layout=layout, blocksize=block)

    dense = torch.eye(4)
    digests = [tensor_digest(compressed(t)) for t in (dense, dense.clone(), 2 * dense, dense.flip(0), torch.eye(4, 6))]
    assert digests[0] == digests[1] and len(set(digests)) == 4
    assert digests[0] != tensor_digest(dense.to_sparse())
    assert gradient_digest(compressed(dense)) == digests[0]
    assert gradient_digest(0 * compressed(dense)) == "zero"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_has_a_digest_of_its_tensors(layout):
    def nested(*lengths: int, last: float = 1.0) -> torch.Tensor:
        rows = [torch.ones(length, 3) for length in lengths]
        rows[-1][-1] = last
        return torch.nested.nested_tensor(rows, layout=layout)

    digests = [tensor_digest(t) for t in (nested(2, 3), nested(2, 3), nested(3, 2), nested(2, 3, last=2.0))]
    assert digests[0] == digests[1] and len(set(digests)) == 3

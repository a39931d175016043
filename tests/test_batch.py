"""Batches of any shape, moved, cast and copied."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from harness.training import batch as of_batches
from harness.training.batch import copied, tensors_in


class Encoding(UserDict[str, Any]):
    """A batch as HuggingFace's tokenizers make it."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class OfItsOwn(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its items."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Attributes(dict[str, Any]):
    """Items that are attributes too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Uncopied(dict[str, Any]):
    """A dictionary that cannot be copied."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError


def moved(batch: Any) -> Any:
    return of_batches.moved(batch, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("kind", [dict, OrderedDict, Encoding, OfItsOwn, Attributes])
def test_a_mapping_keeps_its_type_and_the_original_its_items(kind):
    batch = kind(ids=torch.ones(2), data={"mask": torch.ones(2)})
    held = moved(batch)
    assert type(held) is kind and list(held) == ["ids", "data"]
    assert held["ids"].dtype == held["data"]["mask"].dtype == torch.float64
    assert batch["ids"].dtype == batch["data"]["mask"].dtype == torch.float32


@pytest.mark.parametrize("kind", [Encoding, Attributes])
def test_attributes_of_a_mapping_move_too(kind):
    assert moved(kind(ids=torch.ones(2))).ids.dtype == torch.float64


@pytest.mark.parametrize("batch", [MappingProxyType({"ids": torch.ones(2)}), Uncopied(ids=torch.ones(2))])
def test_a_mapping_that_cannot_be_changed_or_copied_becomes_a_dictionary(batch):
    held = moved(batch)
    assert type(held) is dict and held["ids"].dtype == torch.float64


Pair = namedtuple("Pair", "x y")


@dataclass
class Plain:
    x: Tensor
    note: str = ""


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    inner: Any = None

    @cached_property
    def double(self) -> Tensor:
        return self.x * 2


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor


@dataclass
class Scaled:
    """Its constructor does not take what it holds."""

    x: Tensor = field(init=False)
    missing: Tensor = field(init=False)

    def __init__(self, x: Tensor) -> None:
        self.x = x / 255


class Named(dict[str, Any]):
    """A dictionary whose constructor takes something else, and which holds more than its items."""

    def __init__(self, name: str, x: Tensor) -> None:
        super().__init__(x=x)
        self.name, self.extra = name, [x + 1]


class Sized(list[Tensor]):
    """A list whose constructor takes something else."""

    def __init__(self, size: int, of: Tensor) -> None:
        super().__init__([of] * size)


def ones() -> Tensor:
    return torch.ones(2)


SHAPES = {
    "tensor": ones,
    "list": lambda: [ones(), [ones()]],
    "tuple": lambda: (ones(), "a", 1),
    "named tuple": lambda: Pair(ones(), [ones()]),
    "structure of torch's": lambda: torch.max(torch.ones(2, 2), 0),
    "dict": lambda: {"a": {"b": ones()}},
    "defaultdict": lambda: defaultdict(list, a=ones()),
    "dict of its own": lambda: Named("a", ones()),
    "user's mapping": lambda: Encoding(a=ones()),
    "list of its own": lambda: Sized(2, ones()),
    "user's list": lambda: UserList([ones()]),
    "deque": lambda: deque([ones(), ones()], maxlen=2),
    "packed": lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    "dataclass": lambda: Plain(ones(), "a"),
    "frozen": lambda: Frozen(ones(), [Plain(ones())]),
    "slotted": lambda: Slotted(ones()),
    "field without a place in the constructor": lambda: Scaled(ones()),
    "dataclass in all": lambda: {"a": [Pair(Frozen(ones(), Frozen(ones())), None)]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_cast_and_copied_and_keeps_its_type(shape):
    batch = SHAPES[shape]()
    before = [tensor.clone() for tensor in tensors_in(batch)]
    for made in (moved(batch), copied(batch)):
        assert type(made) is type(batch)
        for tensor in floating(made):
            tensor.add_(1)
    assert {tensor.dtype for tensor in floating(moved(batch))} == {torch.float64}
    assert {tensor.dtype for tensor in floating(copied(batch))} == {torch.float32}
    assert all(map(torch.equal, tensors_in(batch), before))


def floating(batch: Any) -> list[Tensor]:
    """Return the tensors that hold numbers with a point, at least one."""
    found = [tensor for tensor in tensors_in(batch) if tensor.is_floating_point()]
    assert found
    return found


def test_what_is_beside_the_tensors_stays_and_is_copied():
    for made in map(moved, (Named("a", ones()), copied(Named("a", ones())))):
        assert made.name == "a" and made.extra[0].dtype == torch.float64 and made.extra[0].tolist() == [2, 2]
    batch = {"array": numpy.zeros(2), "words": ["a"], "numbers": range(3), "text": b"ab"}
    held, other = moved(batch), copied(batch)
    assert held["array"] is batch["array"] and held["numbers"] == range(3) and held["text"] == b"ab"
    other["array"][0], other["words"][0] = 1, "b"
    assert batch["array"][0] == 0 and batch["words"] == ["a"]


def test_a_frozen_dataclass_computes_again_from_what_it_holds_and_stays_frozen():
    batch = Frozen(ones())
    assert batch.double.dtype == torch.float32
    held = moved(batch)
    assert held.double.dtype == torch.float64
    with pytest.raises(FrozenInstanceError):
        held.x = ones()


def test_a_constructor_that_computes_is_not_called_again():
    assert torch.equal(moved(Scaled(torch.full((2,), 255.0))).x, torch.ones(2, dtype=torch.float64))


def test_complex_numbers_keep_both_parts_and_whole_numbers_their_type():
    made = moved(Frozen(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.int32)))
    assert (made.x.dtype, made.inner.dtype) == (torch.complex128, torch.int32)


def test_packed_sequences_keep_their_lengths_where_torch_wants_them():
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    on_device = of_batches.moved(packed, torch.device("meta"), torch.float32)
    assert isinstance(on_device, PackedSequence)
    assert (on_device.data.device.type, on_device.sorted_indices.device.type, on_device.batch_sizes.device.type) == (
        "meta",
        "meta",
        "cpu",
    )

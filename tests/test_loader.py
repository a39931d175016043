"""Batches on their way to a device."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from harness.training.loader import to_device


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
    return to_device(batch, torch.device("cpu"), torch.float64)


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

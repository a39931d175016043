"""Texts of a run as they can be shown: what a terminal, a page or XML would obey, or could not hold, is written out.

An exception's text, a setting or a label may hold anything, and a folder of records may come from anywhere. So each is made
visible where it enters: what a rank says of its failure when that is recorded, and all other texts when they are reported.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from harness.run.record import Step

_OBEYED = re.compile("[^\t\n\u0020-\u007e\u00a0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Control characters but for tab and end of line, those that turn the direction of text, and those that are no text."""

T = TypeVar("T")


def visible(record: T) -> T:
    """Return a text, or all texts within a record, with such characters as escapes: ``\\x1b`` for a terminal's."""
    shown: T = _visible(record)
    return shown


def _visible(value: Any) -> Any:
    """Return ``value`` itself where nothing in it is to be written out, as records are large and rarely hold any."""
    if isinstance(value, str):
        return _OBEYED.sub(_written_out, value)
    if isinstance(value, Mapping):
        pairs = {_visible(name): _visible(inner) for name, inner in value.items()}
        return value if _are_same(value.keys(), pairs.keys()) and _are_same(value.values(), pairs.values()) else pairs
    if isinstance(value, list | tuple):
        items = [_visible(inner) for inner in value]
        return value if _are_same(value, items) else type(value)(items)
    # Steps hold numbers alone, and are the most of a record; is_dataclass() is true of a class itself too.
    if not dataclasses.is_dataclass(value) or isinstance(value, Step | type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    changed = {name: shown for name, inner in fields.items() if (shown := _visible(inner)) is not inner}
    return dataclasses.replace(value, **changed) if changed else value


def _are_same(before: Any, after: Any) -> bool:
    # By identity, as nan differs from itself.
    return all(old is new for old, new in zip(before, after, strict=True))


def _written_out(found: re.Match[str]) -> str:
    # This encoding takes lone surrogates too, which UTF-8 refuses.
    return found.group().encode("unicode_escape").decode()

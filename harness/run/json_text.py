"""JSON as every reader takes it: numbers that it has no words for are the strings "NaN", "Infinity" and "-Infinity".

That is one rule for all records: what is written by :func:`json_text` comes back by :func:`from_json_text` as it was. A
text that is such a word itself gets an apostrophe in front. Records of before this rule have the bare words, which are no
JSON but are read as well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

_WORD = re.compile("(?P<marks>'*)(?P<number>NaN|-?Infinity)")
_ANY_WORD = re.compile(rf'"{_WORD.pattern}"')


@cache
def _strict(indent: int | None) -> json.JSONEncoder:
    # Left to itself, Python writes a bare NaN, which is no JSON. One encoder serves all records:
    # json.dumps() makes another for each call that is not a plain one.
    return json.JSONEncoder(indent=indent, allow_nan=False)


def json_text(content: Any, indent: int | None = None) -> str:
    """Return ``content`` as JSON."""
    encode = _strict(indent).encode
    try:
        text = encode(content)
    # A number that JSON lacks. To walk through all content first would take longer than to encode it.
    except ValueError:
        return encode(_in_words(content))
    # Few records hold such a number or word, and a step is recorded within the time of the next one.
    return encode(_in_words(content)) if _ANY_WORD.search(text) else text


def from_json_text(text: str | bytes) -> Any:
    """Return what JSON holds, with the numbers that stand in words."""
    text = text.decode() if isinstance(text, bytes) else text
    content = json.loads(text)
    return _in_numbers(content) if _ANY_WORD.search(text) else content


def _in_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _in_words(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_in_words(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"'{value}" if isinstance(value, str) and _WORD.fullmatch(value) else value


def _in_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_in_numbers(inner) for inner in value]
    if isinstance(value, str) and (word := _WORD.fullmatch(value)):
        return value[1:] if word["marks"] else float(value)
    return value

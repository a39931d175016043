"""A setting, declared once: a dataclass's field that carries its help, its place in the configuration, and its bounds.

The schema of ``run.py``, its ``--help`` and what it tells the plugin are made from these declarations, by
:mod:`harness.config`. Ranks read plans, so there is no Hydra here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

MISSING = "???"
"""What Hydra takes for a value that has yet to be given."""

# Of type Any, to be the default of a parameter of any type.
_NONE_GIVEN: Any = dataclasses.MISSING


@dataclass(frozen=True)
class Bound:
    """The values that a setting takes; null is for its type to allow.

    Attributes:
        at_least, above, at_most: Of a number, which must be finite too.
        choices: Of a name.
        words: Unit, or meaning, of the least number.
        or_null: How the sentence ends where null is a way out, which ``{null}`` leaves each door to name.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: Sequence[str] = ()
    words: str = ""
    or_null: str = ""

    def demand(self, value: Any, null: str = "null") -> str:
        """Return what ``value`` must be, as the end of a sentence; nothing where it is that."""
        if value is None:
            return ""
        broken = self._demand_of_name(value) if self.choices else self._demand_of_number(value)
        return broken and f"{broken}{self.or_null.format(null=null)}."

    def _demand_of_name(self, value: Any) -> str:
        if value in self.choices:
            return ""
        return (
            f"must be {' or '.join(self.choices)}" if len(self.choices) == 2 else f"is unknown; use {', '.join(self.choices)}"
        )

    def _demand_of_number(self, value: Any) -> str:
        # Python counts True as a number.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "must be a number"
        # Each comparison is written so that nan fails it.
        if self.at_least is not None and not value >= self.at_least:
            return f"must be 0{self.words} or more" if self.at_least == 0 else f"must be at least {self.at_least}"
        if self.above is not None and not value > self.above:
            return f"must be above {self.above}{self.words}"
        if self.at_most is not None and not value <= self.at_most:
            return f"must be at most {self.at_most}"
        return "must be finite" if value == math.inf else ""


def setting(
    default: Any = _NONE_GIVEN,
    text: str = "",
    *,
    heading: str = "",
    path: str = "",
    schema: Any = _NONE_GIVEN,
    **bound: Any,
) -> Any:
    """Return a field that is a setting.

    Args:
        default: Of the field; a class is made anew for each.
        text: Its line of ``--help``; without one it has none, because the option that is chosen, or its parts, tell.
        heading: Of ``--help``, from this setting on.
        path: Its place in the configuration of ``run.py``: ``group.name``, or by default the field's name.
        schema: Its default there, if that is another.
        bound: See :class:`Bound`.
    """
    metadata = {"text": text, "heading": heading, "path": path, "schema": schema, "bound": Bound(**bound) if bound else None}
    # All instances would share one mutable default, so dataclasses refuse it.
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """A setting, as :func:`setting` declares it.

    Attributes:
        name: Of the field.
        type: Of its values.
        default: Of the field, or the class that is made anew; :data:`MISSING` where it must be given.
    """

    name: str
    type: Any
    default: Any
    path: str
    schema: Any
    text: str
    heading: str
    bound: Bound | None

    @property
    def typed(self) -> str:
        """What a user types before the equals sign: a group, where the setting is told by the option that is chosen."""
        return self.path.partition(".")[0] if self.schema == MISSING else self.path


def settings_of(declaration: type) -> Iterator[Setting]:
    """Yield the settings among a dataclass's fields, in their order."""
    # Where annotations are postponed, a field's own type is a text.
    types, heading = get_type_hints(declaration), ""
    for field in dataclasses.fields(declaration):
        # A field that nobody types: the harness sets it.
        if "text" not in field.metadata:
            continue
        told = dict(field.metadata)
        heading = told["heading"] or heading
        default = next((each for each in (field.default, field.default_factory) if each is not _NONE_GIVEN), MISSING)
        schema = default if told["schema"] is _NONE_GIVEN else told["schema"]
        told |= {"path": told["path"] or field.name, "heading": heading, "schema": schema}
        yield Setting(field.name, types[field.name], default, **told)


def out_of_bounds(values: Any, group: str = "") -> list[str]:
    """Return a sentence for each setting of ``values``, an instance of a declaration, that lies outside of its bounds."""
    bounded = ((each, each.bound, getattr(values, each.name)) for each in settings_of(type(values)) if each.bound)
    named = ((f"{group}{each.typed}={value}", bound.demand(value)) for each, bound, value in bounded)
    return [f"{name} {demand}" for name, demand in named if demand]

"""Overrides that Hydra fails on with pages of its own frames: told in a sentence, before it composes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, QuotedString, RangeSweep
from hydra.errors import HydraException

from harness.config import GROUPS, nodes

_CHOSEN = (*GROUPS, "experiment")
"""Groups of which an option is chosen by its name."""


def refuse_unusable(arguments: Sequence[str], conf: Path) -> None:
    """End the command where an override cannot lead to a job, whatever the configuration is.

    Args:
        arguments: Of the command; flags are left to Hydra, and so is what it cannot parse, for which it has a sentence.
        conf: Folder of the groups of options.

    Raises:
        SystemExit: With a sentence for each such override.
    """
    sentences = [sentence for argument in arguments for sentence in _problems(argument, arguments, conf)]
    if sentences:
        sys.exit("\n".join(sentences) + " No rank was started.")


def _problems(argument: str, arguments: Sequence[str], conf: Path) -> Iterator[str]:
    if argument.startswith("-") or "=" not in argument:
        return
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return
    group, value = override.key_or_group, override.value()
    values = _values(value)
    if group == "experiment" and value is None:
        yield "experiment=null is how a command is without one: leave it out."
    elif group in _CHOSEN and any(not _is_option(chosen, group) for chosen in values):
        yield f"{argument} names no option of {group}: {', '.join(_options(group, conf))}."
    if isinstance(value, IntervalSweep) and not any(other.startswith("hydra/sweeper=") for other in arguments):
        yield f"{argument}: interval() is for a sweeper that searches, as hydra/sweeper=optuna. Values with commas make jobs."
    elif isinstance(value, Glob) and group not in _CHOSEN:
        yield f"{argument}: glob() chooses among the options of a group, and {group} is none."
    elif isinstance(value, RangeSweep) and not values:
        yield f"{argument} leaves no value, and so no job."


def _values(value: Any) -> list[Any]:
    """Return the value, or those of a sweep, as Hydra types them; none where something else chooses them."""
    match value:
        case ChoiceSweep():
            return value.list or []
        case RangeSweep():
            # The first will do: a range may have more than fit.
            return list(islice(iter(value.range()), 1))
        case IntervalSweep() | Glob():
            return []
    return [value]


def _is_option(value: Any, group: str) -> bool:
    """Return whether a value may name an option: a text, in quotes or not; of experiments there may be several."""
    # Hydra types what it parses: launcher=1 is a number, and no option has one for its name.
    return isinstance(value, str | QuotedString) or (group == "experiment" and isinstance(value, list))


def _options(group: str, conf: Path) -> list[str]:
    paths = [*(conf / group).glob("*.yaml"), *(Path(path) for path in nodes() if path.startswith(f"{group}/"))]
    return sorted({path.stem for path in paths})

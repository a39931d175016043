"""What the user's own code has logged, from the events of all ranks to a mean a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


class Logged:
    """Numbers by step and name, until all ranks have taken the step."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, list[float]]] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in a ``scalar`` event of any rank."""
        self._steps.setdefault(event["step"], {}).setdefault(event["name"], []).append(event["value"])

    def before(self, end: float = math.inf) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield, and forget, each step before ``end`` with name -> mean over the ranks that logged it."""
        # sorted makes a list first, so that steps can be taken out on the way.
        for step in sorted(step for step in self._steps if step < end):
            yield step, {name: sum(values) / len(values) for name, values in self._steps.pop(step).items()}

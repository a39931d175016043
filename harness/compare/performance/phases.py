"""The phases of a start and an end, and whose time they are. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Owner = Literal["launcher", "framework"]

PHASES: Mapping[str, Owner] = {
    "called": "launcher",
    "process exists": "launcher",
    "code entered": "launcher",
    "task loaded": "launcher",
    "torch imported": "launcher",
    "lazy imports done": "launcher",
    "group ready": "framework",
    "data and model": "framework",
    "verified": "framework",
    "audited": "framework",
    "DDP built": "framework",
    "first step": "framework",
    "warm": "framework",
    "last step": "framework",
    "finished": "framework",
    "returned": "launcher",
}
"""The marks in order; each ends the phase of its name. The owner is who decides how long that phase takes.

Imports are the launcher's: one that preloads does this work before a process exists, one with fresh interpreters in
every rank. Whichever phase it falls into, its owner must be the same, or preloading would look like a faster framework.
"""

PROOF = ("verified", "audited")
"""Phases that are no part of starting: they are left out where starts are compared."""


@dataclass(frozen=True)
class Phase:
    """The time up to the mark of its name, from the mark before."""

    phase: str
    seconds: float
    owner: Owner


def phases(marks: Mapping[str, float]) -> list[Phase]:
    """Return the phases of one rank, in order.

    Where a mark is missing, its phase is joined to the next one that has a mark; what cannot be laid to the launcher
    alone is the framework's. A mark earlier than the one before (work that a server did in advance) takes 0 s.

    Args:
        marks: Name -> CLOCK_MONOTONIC in seconds; the parent's ``called`` and ``returned`` among them.

    Raises:
        ValueError: A mark has a name that is not in :data:`PHASES`.
    """
    # A misspelt mark would in silence join its phase to the next one, and lay its time to another owner.
    unknown = marks.keys() - PHASES.keys()
    if unknown:
        raise ValueError(f"unknown marks {sorted(unknown)}; known are {list(PHASES)}")
    result: list[Phase] = []
    reached, owners = math.nan, set[Owner]()
    for name, owner in PHASES.items():
        owners.add(owner)
        end = marks.get(name, math.nan)
        if not math.isfinite(end):
            continue
        # The first mark of all begins a phase and ends none.
        if not math.isnan(reached):
            result.append(Phase(name, max(0.0, end - reached), _sole(owners)))
        # max: after a mark made in advance, time goes on from the latest one, so that the phases add up.
        reached, owners = end if math.isnan(reached) else max(reached, end), set()
    return result


def _sole(owners: set[Owner]) -> Owner:
    return "launcher" if owners == {"launcher"} else "framework"

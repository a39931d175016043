"""What launchers are like: for whoever must know it without starting anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What a launcher is like.

    Attributes:
        needs_one_rank: True where it runs its only rank in the process that asks.
        shows_own_output: True where its ranks print to the console themselves.
        server_start_method: The start method with which a warm server forks the ranks; empty where none does.
        runs_scripts: True where a script finds the fresh interpreter that it counts on: for the launch command.
        has_agent: True where torch's agent starts the ranks, which may span machines and be started again.
    """

    needs_one_rank: bool = False
    shows_own_output: bool = False
    server_start_method: str = ""
    runs_scripts: bool = False
    has_agent: bool = False


# Not attributes of the launchers: this room lies below theirs, and what reads records starts nothing.
TRAITS: Mapping[str, Traits] = {
    "spawn": Traits(server_start_method="forkserver"),
    "launch": Traits(runs_scripts=True),
    "torchrun": Traits(runs_scripts=True, has_agent=True),
    "inline": Traits(needs_one_rank=True, shows_own_output=True),
}
"""Launcher -> what it is like, where that is out of the ordinary."""


def traits_of(method: str) -> Traits:
    """Return what a launcher is like; those that are not in the table have no traits."""
    return TRAITS.get(method, Traits())


def method_for_scripts(needs_agent: bool) -> str:
    """Return the launcher for scripts: with torch's agent where its work is needed, and otherwise without."""
    return next(name for name, traits in TRAITS.items() if traits.runs_scripts and traits.has_agent == needs_agent)


def is_served(method: str, start_method: str) -> bool:
    """Return True where ranks are forked from a server that outlives their run."""
    # Without the first part, a launcher with no server would pass for one where there is no start method.
    return bool(start_method) and traits_of(method).server_start_method == start_method

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
    """

    needs_one_rank: bool = False
    shows_own_output: bool = False
    server_start_method: str = ""


TRAITS: Mapping[str, Traits] = {
    "spawn": Traits(server_start_method="forkserver"),
    "inline": Traits(needs_one_rank=True, shows_own_output=True),
}
"""Launcher -> what it is like, where that is out of the ordinary."""


def traits_of(method: str) -> Traits:
    """Return what a launcher is like; those that are not in the table have no traits."""
    return TRAITS.get(method, Traits())


def is_served(method: str, start_method: str) -> bool:
    """Return True where ranks are forked from a server that outlives their run."""
    return bool(start_method) and traits_of(method).server_start_method == start_method

"""Where ranks stand that have been silent for too long."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.run.record import RankResult


def absent_ranks(stacks: Sequence[str], results: Sequence[RankResult]) -> list[int]:
    """Return the ranks that do not wait for others, by their stacks: the innermost frame of the main thread tells.

    Args:
        stacks: What ``faulthandler`` wrote, per rank.
        results: What each recorded; one that has ended is not counted.
    """
    waiting = re.compile(r"torch/(distributed|autograd)/|\bbarrier\b|\b_await_port\b|\bkeep_store\b")
    absent = []
    for result, text in zip(results, stacks, strict=True):
        # The last part: faulthandler begins with the youngest thread, and the main one is the oldest.
        main_thread = text.rpartition("(most recent call first):")[2].strip().splitlines()
        # Of three frames, because what waits may be C code in a file whose name does not tell.
        if result.status == "unfinished" and not waiting.search(" ".join(main_thread[:3])):
            absent.append(result.rank)
    return absent

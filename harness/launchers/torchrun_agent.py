"""Torch's elastic agent as a program that dies with its parent.

``python -m harness.launchers.torchrun_agent [torchrun's own arguments]``
"""

from __future__ import annotations

import os
import sys

from harness.rank.lifetime import die_with_parent
from harness.run.environment import PARENT


def main(arguments: list[str]) -> int:
    """Run the agent and return torchrun's exit status, which is 1 whatever its ranks' were: their workers tell."""
    die_with_parent(int(os.environ[PARENT]))
    # Its workers inherit this, and die with it in turn.
    os.environ[PARENT] = str(os.getpid())
    # Not at the top: this takes seconds, in which the parent may end.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except (ChildFailedError, SignalException):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

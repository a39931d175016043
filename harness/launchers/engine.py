"""Torch's elastic engine as a program that dies with its parent and leaves the exit codes of its ranks.

``python -m harness.launchers.engine RUN_DIR [torchrun's own arguments]``
"""

from __future__ import annotations

import os
import sys

from harness.environ import PARENT
from harness.lifetime import die_with_parent
from harness.rundir import RunDir, write_json


def main(arguments: list[str]) -> int:
    """Run the engine; torchrun's own exit status is 1 whatever its ranks' were, so the codes go into the run's folder."""
    die_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    run = RunDir(arguments[0])
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments[1:])
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        write_json(run.engine_codes, codes)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

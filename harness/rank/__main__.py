"""``python -m harness.rank RUN_DIR``: be one rank of a run, under RANK, WORLD_SIZE and their kin."""

import sys

from harness.rank.process import main

if __name__ == "__main__":
    main(sys.argv[1])

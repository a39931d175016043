"""``python -m harness.launch [options] script.py``: see :mod:`harness.entrypoints.launch_command`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from harness.entrypoints.launch_command import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        # Before the first rank; from then on main() ends what runs.
        sys.exit(130)

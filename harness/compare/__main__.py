"""``python -m harness.compare DIR``: all reports again from folders."""

import sys

from harness.report.rebuild import main

if __name__ == "__main__":
    sys.exit(main())

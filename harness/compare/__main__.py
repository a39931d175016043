"""``python -m harness.compare DIR``: all reports again from folders."""

import sys

if __name__ == "__main__":
    try:
        from harness.report.rebuild import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

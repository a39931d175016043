"""``python -m harness.compare DIR``: all reports again from folders."""

import sys

if __name__ == "__main__":
    try:
        # Imported here, as it takes long enough to be interrupted; 130 is what a shell says of SIGINT (128 + 2).
        from harness.report.rebuild import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

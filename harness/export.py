"""``python -m harness.export FOLDER [FILE]``: the weights of a job, its checkpoint's among them, as one file to take home."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import HarnessError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, say where it is, and return the exit status."""
    asked = parser().parse_args(arguments)
    try:
        # Here, as help and mistakes need no torch.
        from harness.training.weights import export

        source = Path(asked.folder)
        target = Path(asked.file) if asked.file else (source if source.is_dir() else source.parent) / "model.safetensors"
        if target.suffix != ".safetensors":
            print(f"harness.export: {target} must end in .safetensors.", file=sys.stderr)
            return 1
        target.parent.mkdir(parents=True, exist_ok=True)
        print(export(source, target))
    except HarnessError as error:
        print(f"harness.export: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"harness.export: {error.filename} cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    # Under python -OO there is no docstring.
    text = (__doc__ or "").replace("``", "")
    made = argparse.ArgumentParser(prog="python -m harness.export", description=text, allow_abbrev=False)
    made.add_argument(
        "folder", metavar="FOLDER", help="a job's folder (outputs/DAY/TIME/0), a checkpoint, or weights of torch's"
    )
    made.add_argument("file", nargs="?", metavar="FILE", help="what to write, .safetensors; left out: model.safetensors there")
    return made


if __name__ == "__main__":
    sys.exit(main())

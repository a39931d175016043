"""What a training leaves to go on from, as the parent sees it: found, and whole, without torch."""

from __future__ import annotations

import zipfile
from itertools import chain
from pathlib import Path

from harness.errors import ConfigError
from harness.run.folder import RunDir


def find_checkpoint(path: Path) -> Path:
    """Return the file of a checkpoint that is named by its path or its run's folder, after every byte has been checked.

    torch writes a zip archive, with a CRC-32 of each part, and does not look at it when it reads: a flipped bit in a tensor
    would go on training unseen.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    file = RunDir(path).checkpoint if path.is_dir() else path
    if not file.exists():
        # Easily typed by mistake: a sweep's folder, which holds those of its jobs.
        inside = sorted(path.glob(f"*/{file.name}")) if path.is_dir() else []
        hint = f" Did you mean resume={inside[0].parent}?" if inside else " checkpoint_every=N writes some."
        raise ConfigError(f"resume={path}: there is no checkpoint there.{hint}")
    if not file.is_file():
        # Reading a pipe or a device might never end.
        raise ConfigError(f"resume={path} is no checkpoint: it is a pipe, a device or the like, and not a file.")
    if not is_whole(file):
        raise unreadable(file)
    return file


def is_whole(file: Path) -> bool:
    """Return whether a file that torch wrote has in every part the bytes that were written."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
        # What the module raises of a damaged directory, a compression that there is not, a password.
        return False


def unreadable(file: Path) -> ConfigError:
    """Return what to say of a file that is no checkpoint, or none any more."""
    return ConfigError(f"resume={file} cannot be read as a checkpoint: it is damaged, or something else has written it.")


def find_weights(source: Path) -> Path:
    """Return the file of weights that is named by its path or a job's folder: the weights alone, or else its checkpoint.

    Raises:
        ConfigError: There is none.
    """
    if not source.is_dir():
        if source.is_file():
            return source
        raise ConfigError(f"weights={source}: there is no such file.")
    run = RunDir(source)
    # A job that was ended before it left its weights may have left a checkpoint.
    found = [file for file in (run.weights, run.weights.with_suffix(".pt"), run.checkpoint) if file.is_file()]
    if not found:
        inside = sorted(chain(source.glob(f"*/{run.weights.name}"), source.glob(f"*/{run.checkpoint.name}")))
        hint = f" Did you mean weights={inside[0].parent}?" if inside else ""
        raise ConfigError(f"weights={source}: no job has left weights there.{hint}")
    return found[0]

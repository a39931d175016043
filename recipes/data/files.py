"""Whole files, plain or gzip, with errors that name the file."""

import gzip
import zlib
from pathlib import Path

_GZIP_MAGIC = b"\x1f\x8b"


def read_bytes(path: Path) -> bytes:
    """Return what a file holds; a gzip file, known by its first two bytes and not by its name, is unpacked.

    Raises:
        ValueError: The file cannot be read, or its gzip data is damaged or cut short.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    # In this order: it is cut short, its checksum is wrong, its data make no sense.
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}): copy or download it again.") from error

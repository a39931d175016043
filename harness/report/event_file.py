"""TensorBoard's event file, written record by record.

TensorBoard's own ``EventFileWriter`` starts a thread, which would forbid ranks that are forked from this process, imports
numpy while the ranks want the cores, and cannot go on with a file that it has closed. The format is a frame around a
message: length, its checksum, message, its checksum (https://www.tensorflow.org/tutorials/load_data/tfrecord).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING

PREFIX = "events.out.tfevents."


def _crc_table() -> tuple[int, ...]:
    """Return the table of CRC-32C (Castagnoli, reflected polynomial 0x82F63B78)."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of ``data`` as event files hold it: CRC-32C, rotated, plus a constant."""
    # CRC-32C begins with all bits set and ends with all turned round, so that leading and trailing zeros count.
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    # Masked, as the format asks: the checksum of data that holds its own checksum would be a weak one.
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(message: bytes) -> bytes:
    """Return one record of an event file."""
    length = struct.pack("<Q", len(message))
    # The length has a checksum of its own: a reader must trust it before it can find the end of the message.
    return length + struct.pack("<I", masked_crc32c(length)) + message + struct.pack("<I", masked_crc32c(message))


# The smallest tensor there is, which TensorBoard's own HParams writes too where metadata say all.
_NOTHING = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=0)]))


class EventFile:
    """The event file of one run. Each event is one write to the end of it: a crash loses none that was written."""

    def __init__(self, folder: Path, wall_time: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The name must be new, as TensorBoard may have read another one of this folder already.
        seconds, rest = divmod(time.time_ns(), 10**9)
        self.path = folder / f"{PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest}"
        # By convention the first event of a file tells its version.
        start = Event(wall_time=wall_time, file_version="brain.Event:2", source_metadata=SourceMetadata(writer="harness"))
        self._append(start)

    def scalars(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        """Add numbers of one step."""
        self.summary([Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()], step, wall_time)

    def text(self, tag: str, markdown: str, wall_time: float) -> None:
        """Add a text."""
        value = Summary.Value(tag=tag, tensor=_string(markdown.encode()), metadata=_metadata("text"))
        self.summary([value], 0, wall_time)

    def picture(self, tag: str, png: bytes, size: tuple[int, int], wall_time: float) -> None:
        """Add a picture of ``size`` (width, height) pixels."""
        # colorspace 4 is RGBA, as matplotlib writes its PNG files.
        image = Summary.Image(width=size[0], height=size[1], colorspace=4, encoded_image_string=png)
        self.summary([Summary.Value(tag=tag, image=image)], 0, wall_time)

    def plugin(self, tag: str, plugin: str, wall_time: float, content: bytes = b"", tensor: bytes | None = None) -> None:
        """Add what a plugin of TensorBoard reads: ``content`` from its metadata, or ``tensor`` as its value."""
        value = _NOTHING if tensor is None else _string(tensor)
        self.summary([Summary.Value(tag=tag, metadata=_metadata(plugin, content), tensor=value)], 0, wall_time)

    def summary(self, values: Iterable[Summary.Value], step: int, wall_time: float) -> None:
        """Add one event."""
        self._append(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def _append(self, event: Event) -> None:
        # Opened anew each time: a sweep of hundreds of jobs holds no file open.
        with self.path.open("ab", buffering=0) as file:
            file.write(frame(event.SerializeToString()))


def _string(content: bytes) -> TensorProto:
    return TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=TensorShapeProto())


def _metadata(plugin: str, content: bytes = b"") -> SummaryMetadata:
    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content))


def clear(folder: Path) -> None:
    """Remove the event files directly in a folder."""
    for path in folder.glob(f"{PREFIX}*"):
        path.unlink()

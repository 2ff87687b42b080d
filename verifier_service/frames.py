"""Framed msgpack: one map after another, written whole and read as far as it is whole.

Knows no contents. Invariant: whatever stands behind the last whole map (a record that a crash
tore, foreign bytes) is never taken for one, and costs nothing that stands before it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgpack


def pack_frame(frame: Mapping[str, object]) -> bytes:
    """One map as it stands in a file."""
    packed: bytes = msgpack.packb(frame)
    return packed


def read_frames(stream: BinaryIO) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole maps and the offset at which each ends; stops before what is torn or no map."""
    unpacker = msgpack.Unpacker(stream, raw=False)
    while True:
        try:
            frame = unpacker.unpack()
        except (msgpack.OutOfData, msgpack.UnpackException, ValueError):
            return
        if not isinstance(frame, dict):
            return
        yield frame, unpacker.tell()

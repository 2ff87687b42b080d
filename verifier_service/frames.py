"""Framed msgpack: one map after another, written whole and read as far as it is whole.

Knows no contents. Invariant: whatever stands behind the last whole map (a record that a crash
tore, foreign bytes) is never taken for one, and costs nothing that stands before it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import msgpack

_ESCAPE: Final = "backslashreplace"


def pack_frame(frame: Mapping[str, object], *, escape: bool = False) -> bytes:
    """One map as it stands in a file.

    Texts that are no Unicode (lone surrogates) raise UnicodeEncodeError, a ValueError; with
    `escape` they stand there as `escaped` gives them.
    """
    packed: bytes = msgpack.packb(frame, unicode_errors=_ESCAPE if escape else None)
    return packed


def escaped(text: str) -> str:
    """The text, lone surrogates as a backslash, `u` and four digits; another text unchanged."""
    return text.encode(errors=_ESCAPE).decode()


def read_frames(
    stream: BinaryIO, *, only_torn: bool = False
) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole maps and the offset at which each ends; stops before what is torn or no map.

    only_torn: raise ValueError where what follows a map is damaged, not cut short.
    """
    unpacker = msgpack.Unpacker(stream, raw=False)
    end = 0
    while True:
        try:
            frame = unpacker.unpack()
        except msgpack.OutOfData:
            return
        except (msgpack.UnpackException, ValueError) as error:
            if only_torn and end:
                raise ValueError(f"damaged behind byte {end}") from error
            return
        if not isinstance(frame, dict):
            return
        end = unpacker.tell()
        yield frame, end

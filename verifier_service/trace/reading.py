"""Finds requests in a folder of trace files, whoever wrote them and however they ended.

Reads files twice: once for ids, once for what is wanted. Knows no engine. Invariant: a torn last
record, an empty file or a foreign one costs nothing but a note; nothing is ever changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from protos.errors import ConfigError, InvalidRequest
from verifier_service.frames import escaped, read_frames
from verifier_service.trace.codec import Decoder, read_header
from verifier_service.trace.records import Closed, Header, Lost, Opened, Record
from verifier_service.trace.story import Part, Story
from verifier_service.trace.writer import PATTERN

_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What one file holds. torn_bytes: of a record that was cut short, at its end."""

    path: Path
    header: Header
    ids: tuple[str, ...]
    torn_bytes: int
    num_lost_steps: int


@dataclass(slots=True)
class _Stay:
    header: Header
    opened: Opened | None = None
    parts: list[Part] = field(default_factory=list)
    closed: Closed | None = None


class TraceFolder:
    """The traces of a folder as they were when it was opened."""

    def __init__(self, folder: Path) -> None:
        """Reads the ids. Raises ConfigError when there is no such folder or it holds no trace."""
        if not folder.is_dir():
            raise ConfigError(f"traces: {folder.name!r} is no directory")
        self.notes: list[str] = []
        self.files: list[TraceFile] = []
        # By name, which begins with the time: request ids come out in order.
        for path in sorted(folder.glob(PATTERN)):
            self._look_into(path)
        if not self.files:
            told = "; ".join(self.notes) or "its files are called trace-*.msgpack"
            raise ConfigError(f"traces: {folder.name!r} holds none ({told})")
        order = dict.fromkeys(name for file in self.files for name in file.ids)
        self.ids: tuple[str, ...] = tuple(order)

    def find(self, wanted: str) -> list[str]:
        """Request ids that a name means: itself, the one that begins so, or a reply's choices in
        their order.

        What is no Unicode is looked for as it was written. Raises InvalidRequest, naming the ids
        that exist.
        """
        wanted = escaped(wanted)
        if wanted in self.ids:
            return [wanted]
        begins = [name for name in self.ids if name.startswith(wanted)]
        # By their number: verifiers record them in files of their own.
        numbers = [name.removeprefix(f"{wanted}-") for name in begins]
        if begins and all(number.isdecimal() for number in numbers):
            return [f"{wanted}-{number}" for number in sorted(numbers, key=int)]
        if len(begins) == 1:
            return begins
        if begins:
            raise InvalidRequest(f"{wanted!r} may be any of {_listing(begins)}", "request")
        raise InvalidRequest(f"no trace of {wanted!r}; there are {_listing(self.ids)}", "request")

    def stories(self, request_id: str) -> list[Story]:
        """A request's stays, in order: more than one where another verifier went on with it."""
        stays: dict[tuple[str, int], _Stay] = {}
        for file in self.files:
            if request_id not in file.ids:
                continue
            if file.torn_bytes:
                self._note(
                    f"{file.path.name}: {file.torn_bytes} bytes at its end are no whole record "
                    "(its verifier was killed, or is writing just now)"
                )
            try:
                for record in _records(file.path):
                    if isinstance(record, Lost) or record.request_id != request_id:
                        continue
                    stay = stays.setdefault((file.header.writer, record.key), _Stay(file.header))
                    _add(stay, record)
            except OSError as error:  # removed meanwhile to make room, for one
                self._note(f"{file.path.name}: {error.strerror or error}")
        found = [_story(request_id, stay) for stay in stays.values()]
        return sorted(found, key=lambda story: story.header.time_of(story.began_s))

    def lost_steps(self, story: Story) -> int:
        """Steps of this verifier that could not be recorded, this request's or not."""
        return sum(f.num_lost_steps for f in self.files if f.header.writer == story.header.writer)

    def _look_into(self, path: Path) -> None:
        ids: dict[str, None] = {}
        num_lost = end = 0
        header: Header | None = None
        try:
            for frame, offset in _frames(path):
                end = offset
                if header is None:
                    header = read_header(frame)
                elif frame.get("kind") == "lost":
                    lost = frame.get("num_steps")
                    num_lost += lost if isinstance(lost, int) else 0
                elif isinstance(frame.get("id"), str):
                    ids[frame["id"]] = None
            size = path.stat().st_size
        except (ConfigError, OSError) as error:
            self._note(f"{path.name}: {getattr(error, 'strerror', None) or error}")
            return
        if header is None:
            self._note(f"{path.name}: no whole header")
            return
        self.files.append(TraceFile(path, header, tuple(ids), size - end, num_lost))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _frames(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    with path.open("rb") as stream:
        yield from read_frames(stream)


def _records(path: Path) -> Iterator[Record | Lost]:
    decoder = Decoder()
    for frame, _ in _frames(path):
        record = decoder.record(frame)
        if record is not None:
            yield record


def _add(stay: _Stay, record: Record) -> None:
    if isinstance(record, Opened):
        stay.opened = record
    elif isinstance(record, Closed):
        stay.closed = record
    else:
        stay.parts.append(record)


def _story(request_id: str, stay: _Stay) -> Story:
    return Story(stay.header, request_id, stay.opened, tuple(stay.parts), stay.closed)


def _listing(ids: Sequence[str]) -> str:
    """The newest ids, and how many more there are."""
    if not ids:
        return "none"
    shown = ", ".join(ids[-_LISTED:])
    return shown if len(ids) <= _LISTED else f"{shown} and {len(ids) - _LISTED} older ones"

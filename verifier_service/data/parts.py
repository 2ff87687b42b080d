"""Parts: what a replica made of one block of items, as framed msgpack; and the folder they lie in.

    {"format": "outrider-part", "version": 1, "run", "block", "items", "digest", "fingerprint"}
    {"i": index, "a": [prompt ids, answer ids, prompt ids, ...], "s": why skipped}    one an item

Ids are little-endian uint32. Knows neither clusters nor targets. Invariants: a part in the folder
is whole or is not counted; parts of another run are refused, not overwritten.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np

from protos.errors import ConfigError
from verifier_service.data.answers_file import Answer
from verifier_service.data.regenerate import Outcome

FORMAT: Final = "outrider-part"
VERSION: Final = 1
_ID_TYPE: Final = "<u4"
_SUFFIX: Final = ".msgpack"


@dataclass(frozen=True, slots=True)
class Part:
    """run: identifies the settings. digest, fingerprint: of the target that computed it."""

    run: str
    block: int
    digest: str
    fingerprint: str
    outcomes: tuple[Outcome, ...]


def pack_part(part: Part) -> bytes:
    """The part as `unpack_part` reads it."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "run": part.run,
        "block": part.block,
        "items": len(part.outcomes),
        "digest": part.digest,
        "fingerprint": part.fingerprint,
    }
    frames: list[Mapping[str, object]] = [header]
    for outcome in part.outcomes:
        ids = [ids for a in outcome.answers for ids in (a.prompt_ids, a.answer_ids)]
        packed = [np.asarray(one, _ID_TYPE).tobytes() for one in ids]
        frames.append({"i": outcome.index, "a": packed, "s": outcome.skipped})
    return b"".join(msgpack.packb(frame) for frame in frames)


def unpack_part(data: bytes) -> Part | None:
    """The part; None when it is torn or none at all."""
    unpacker = msgpack.Unpacker(io.BytesIO(data), raw=False)
    try:
        header, *frames = list(unpacker)
    except (ValueError, msgpack.UnpackException):
        return None
    # A torn frame at the end is not read at all: the count tells.
    if not _is_header(header) or len(frames) != header["items"]:
        return None
    outcomes = tuple(_outcome(frame) for frame in frames)
    return Part(header["run"], header["block"], header["digest"], header["fingerprint"], outcomes)


class PartsFolder:
    """Parts of one run on disk, by block. fingerprint: of those found at first; "" for none."""

    def __init__(self, path: Path, run: str) -> None:
        """Reads what an earlier run left. Raises ConfigError for parts of another run."""
        self._path = path
        self._run = run
        self._held: set[int] = set()
        self.fingerprint = ""
        for file in sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else []:
            self._find(file)

    def holds(self, block: int) -> bool:
        """True when the block's part is whole."""
        return block in self._held

    def write(self, part: Part) -> None:
        """Keep a part; it is there as a whole or not at all."""
        self._path.mkdir(parents=True, exist_ok=True)
        file = self._file(part.block)
        scratch = file.with_suffix(".tmp")
        scratch.write_bytes(pack_part(part))
        scratch.replace(file)
        self._held.add(part.block)

    def read(self, block: int) -> Part:
        """The part of a block that is held. Raises ConfigError when it is gone."""
        part = self._part_of(self._file(block))
        if part is None:
            raise ConfigError(f"part {block} of {self._path.name} changed under this run")
        return part

    def remove(self) -> None:
        """Delete the parts, and the folder unless something else lies in it."""
        if not self._path.is_dir():
            return
        for block in self._held:
            self._file(block).unlink(missing_ok=True)
        for scratch in self._path.glob("*.tmp"):
            scratch.unlink()
        if not any(self._path.iterdir()):
            self._path.rmdir()
        self._held.clear()

    def _find(self, file: Path) -> None:
        part = self._part_of(file)
        if part is None:
            return
        if part.run != self._run:
            raise ConfigError(
                f"{self._path.name} holds parts of a run with other settings, prompts or blocks; "
                "go on with the same ones, or move it away"
            )
        if file == self._file(part.block):
            self._held.add(part.block)
            self.fingerprint = self.fingerprint or part.fingerprint

    def _part_of(self, file: Path) -> Part | None:
        try:
            return unpack_part(file.read_bytes())
        except OSError:
            return None

    def _file(self, block: int) -> Path:
        return self._path / f"{block:08d}{_SUFFIX}"


def _is_header(frame: object) -> bool:
    if not isinstance(frame, dict) or frame.get("format") != FORMAT:
        return False
    texts = all(isinstance(frame.get(key), str) for key in ("run", "digest", "fingerprint"))
    counts = all(isinstance(frame.get(key), int) for key in ("block", "items"))
    return texts and counts and frame.get("version") == VERSION


def _outcome(frame: Mapping[str, Any]) -> Outcome:
    ids: Sequence[tuple[int, ...]] = [
        tuple(np.frombuffer(packed, _ID_TYPE).tolist()) for packed in frame["a"]
    ]
    answers = tuple(map(Answer, ids[::2], ids[1::2]))
    return Outcome(frame["i"], answers, frame["s"])

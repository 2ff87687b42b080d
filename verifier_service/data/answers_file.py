"""The answers file: one msgpack map (the header), then one map a record, append-only.

    {"format": "outrider-answers", "version": 1, "target", "vocab_size", "ids", "fields", ...}
    {"p": prompt ids, "r": answer ids}      little-endian bytes of the type that `ids` names

Knows no model. Invariants: what was read back is a prefix of whole records; a torn last record
is cut off before anything is appended; a finished file's header says how many records it holds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from protos.errors import ConfigError
from verifier_service.frames import pack_frame, read_frames

FORMAT: Final = "outrider-answers"
VERSION: Final = 1
_ID_TYPES: Final = {"uint16 little-endian": "<u2", "uint32 little-endian": "<u4"}
_TOTALS: Final = ("records", "answer_tokens")

Header = dict[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt, chat template applied, and the target's answer; ids."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def make_header(target: str, vocab_size: int, facts: Mapping[str, object]) -> Header:
    """The header of a new file; ids take two bytes unless the vocabulary needs four."""
    ids = "uint16 little-endian" if vocab_size <= 1 << 16 else "uint32 little-endian"
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": target,
        "vocab_size": vocab_size,
        "ids": ids,
        "fields": {"p": "prompt ids, chat template applied", "r": "answer ids, end included"},
        **facts,
    }


class AnswersFile:
    """Appends records to a file, after checking and repairing what is there."""

    def __init__(self, path: Path, header: Header) -> None:
        """Opens or creates `path`.

        Raises ConfigError when the file was written with another header (resuming would mix two
        runs) or is damaged. The part of a record that a crash left behind is cut off.
        """
        self._path = path
        self._header = header
        self._id_type = _ID_TYPES[str(header["ids"])]
        self.answers: list[Answer] = []
        self._ends: list[int] = []
        if path.exists() and path.stat().st_size:
            self._recover()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._ends = [self._replace_by([pack_frame(header)])]

    def append(self, answers: Iterable[Answer]) -> None:
        """Write whole records and hand them to the operating system."""
        frames = [pack_frame(self._frame(answer)) for answer in answers]
        with self._path.open("ab") as stream:
            stream.write(b"".join(frames))
        for frame in frames:
            self._ends.append(self._ends[-1] + len(frame))

    def cut_to(self, num_records: int) -> None:
        """Drop every record after the first `num_records`."""
        del self.answers[num_records:]
        del self._ends[num_records + 1 :]
        with self._path.open("r+b") as stream:
            stream.truncate(self._ends[-1])

    def seal(self) -> None:
        """Put the totals into the header, in one rename: the file is complete."""
        frames = [frame for frame, _ in _frames_of(self._path)][1:]
        totals = {
            "records": len(frames),
            "answer_tokens": sum(len(f["r"]) for f in frames) // np.dtype(self._id_type).itemsize,
        }
        self._replace_by(
            [pack_frame({**self._header, **totals}), *(pack_frame(frame) for frame in frames)]
        )

    def _recover(self) -> None:
        frames = _frames_of(self._path)
        if not frames or frames[0][0].get("format") != FORMAT:
            raise ConfigError(f"{self._path.name} exists and is no answers file")
        found = {k: v for k, v in frames[0][0].items() if k not in _TOTALS}
        if found != self._header:
            keys = {*found, *self._header}
            other = sorted(k for k in keys if found.get(k) != self._header.get(k))
            raise ConfigError(
                f"{self._path.name} was begun with other settings ({', '.join(other)}); "
                "resume with the same ones or choose another file"
            )
        self.answers = [self._answer(frame) for frame, _ in frames[1:]]
        if len(frames[0][0]) != len(found):
            # Sealed by an earlier run: open it again, totals are written when it is complete.
            packed = [pack_frame(self._header), *(pack_frame(frame) for frame, _ in frames[1:])]
            self._replace_by(packed)
            self._ends = np.cumsum([len(p) for p in packed]).tolist()
        else:
            self._ends = [end for _, end in frames]
        self.cut_to(len(self.answers))

    def _replace_by(self, packed: list[bytes]) -> int:
        """Put these frames in the file's place, all or none; returns their bytes."""
        scratch = self._path.with_name(self._path.name + ".tmp")
        num_bytes = scratch.write_bytes(b"".join(packed))
        scratch.replace(self._path)
        return num_bytes

    def _frame(self, answer: Answer) -> dict[str, bytes]:
        return {
            "p": np.asarray(answer.prompt_ids, self._id_type).tobytes(),
            "r": np.asarray(answer.answer_ids, self._id_type).tobytes(),
        }

    def _answer(self, frame: Mapping[str, bytes]) -> Answer:
        prompt, answer = (np.frombuffer(frame[key], self._id_type) for key in ("p", "r"))
        return Answer(tuple(prompt.tolist()), tuple(answer.tolist()))


def read_answers(path: Path) -> tuple[Header, list[Answer]]:
    """Header and records of a file. Raises ConfigError when it is no answers file, or damaged."""
    frames = [frame for frame, _ in _frames_of(path)]
    if not frames or frames[0].get("format") != FORMAT:
        raise ConfigError(f"{path.name} is no answers file")
    id_type = _ID_TYPES[str(frames[0]["ids"])]
    answers = [
        Answer(*(tuple(np.frombuffer(frame[key], id_type).tolist()) for key in ("p", "r")))
        for frame in frames[1:]
    ]
    return frames[0], answers


def read_header(path: Path) -> Header:
    """The header alone. Raises ConfigError when the file is no answers file."""
    with path.open("rb") as stream:
        header, _ = next(read_frames(stream), ({}, 0))
    if header.get("format") != FORMAT:
        raise ConfigError(f"{path.name} exists and is no answers file")
    return header


def _frames_of(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Whole maps and where each ends. Damage inside is refused: a cut would lose records."""
    with path.open("rb") as stream:
        try:
            return list(read_frames(stream, only_torn=True))
        except ValueError as error:
            raise ConfigError(f"{path.name}: {error}; it was left as it is") from error

"""Recorded answers: read a framed msgpack file, split it into training and held-out records.

The file is one msgpack map (the header) followed by one map per record: `p` the prompt ids and
`r` the answer ids, little-endian bytes of the type that the header's `ids` names. Nothing here
knows a model. Invariant: the split depends on a record's index and the seed alone, so every tool
sees the same held-out set.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import numpy.typing as npt

ANSWERS_FORMAT = "outrider-answers"
ID_TYPES = {"uint16 little-endian": "<u2", "uint32 little-endian": "<u4"}


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt and the target's answer to it; `ids` is prompt then answer."""

    index: int
    ids: npt.NDArray[np.int64]
    prompt_len: int

    def __post_init__(self) -> None:
        if not 0 < self.prompt_len <= len(self.ids):
            raise ValueError(f"record {self.index}: prompt of {self.prompt_len} in {len(self.ids)}")

    @property
    def answer_len(self) -> int:
        return len(self.ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Split:
    """Indices into the list of records."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def read_records(path: Path, first: int = 0) -> list[Record]:
    """All records of an answers file, in file order, numbered from `first`.

    Raises ValueError when the header is not that of an answers file or a record is malformed.
    """
    with path.open("rb") as stream:
        unpacker = msgpack.Unpacker(stream, raw=False)
        header = next(unpacker, None)
        if not isinstance(header, dict) or header.get("format") != ANSWERS_FORMAT:
            raise ValueError(f"{path}: expected a header with format {ANSWERS_FORMAT!r}")
        vocab_size = int(header["vocab_size"])
        named = header.get("ids", "uint16 little-endian")
        if named not in ID_TYPES:
            raise ValueError(f"{path}: ids are {named!r}, known: {', '.join(ID_TYPES)}")
        dtype = ID_TYPES[named]
        records = [_record(n, item, vocab_size, dtype) for n, item in enumerate(unpacker, first)]
    expected = header.get("records", len(records))
    if len(records) != expected:
        raise ValueError(f"{path}: header promises {expected} records, found {len(records)}")
    return records


def _record(index: int, item: dict[str, bytes], vocab_size: int, dtype: str) -> Record:
    prompt = np.frombuffer(item["p"], dtype=dtype).astype(np.int64)
    answer = np.frombuffer(item["r"], dtype=dtype).astype(np.int64)
    ids = np.concatenate([prompt, answer])
    if ids.size and int(ids.max()) >= vocab_size:
        raise ValueError(f"record {index}: id {int(ids.max())} outside {vocab_size}")
    return Record(index=index, ids=ids, prompt_len=len(prompt))


def split_records(num_records: int, held_out_share: float, seed: int) -> Split:
    """Hash every index with the seed; the smallest hashes are held out."""
    if not 0.0 < held_out_share < 1.0:
        raise ValueError(f"held_out_share must lie between 0 and 1, got {held_out_share}")
    order = sorted(range(num_records), key=lambda index: _hash(index, seed))
    num_held_out = max(1, round(num_records * held_out_share))
    held_out = frozenset(order[:num_held_out])
    return Split(
        train=tuple(index for index in range(num_records) if index not in held_out),
        held_out=tuple(sorted(held_out)),
    )


def without_shared_prompts(records: Sequence[Record], split: Split) -> Split:
    """The same training records; held out only those whose prompt training never shows.

    A prompt may have been answered more than once, and a second answer is no unseen text.
    """
    shown = {_prompt(records[index]) for index in split.train}
    unseen = tuple(index for index in split.held_out if _prompt(records[index]) not in shown)
    return Split(train=split.train, held_out=unseen)


def share_of(split: Split, train_share: float, seed: int) -> Split:
    """The same held-out records; a share of the training records, smaller shares within larger."""
    order = sorted(split.train, key=lambda index: _hash(index, seed + 1))
    kept = frozenset(order[: max(1, round(train_share * len(order)))])
    return Split(tuple(index for index in split.train if index in kept), split.held_out)


def _prompt(record: Record) -> bytes:
    return record.ids[: record.prompt_len].tobytes()


def _hash(index: int, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{index}".encode()).hexdigest()


def pack_by_length(
    lengths: Sequence[int], order: Sequence[int], max_padded_tokens: int
) -> list[tuple[int, ...]]:
    """Consecutive entries of `order` into batches whose padded size stays within the budget.

    `order` should be sorted by length; a single entry longer than the budget makes its own batch.
    """
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    longest = 0
    for index in order:
        longest_next = max(longest, lengths[index])
        if current and longest_next * (len(current) + 1) > max_padded_tokens:
            batches.append(tuple(current))
            current, longest_next = [], lengths[index]
        current.append(index)
        longest = longest_next
    if current:
        batches.append(tuple(current))
    return batches

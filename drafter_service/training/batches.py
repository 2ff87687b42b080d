"""Training batches: whole records, laid out flat, prompt rows apart from answer rows.

    tokens    x0 .. x(P-1) | xP ........ x(P+R-1)          P prompt, R answer tokens
    row t   = (aux of token t, token t+1), predicts token t+2
    prompt rows  t = 0 .. P-2           keys and values only
    answer rows  t = P-1 .. P+R-2       queries too; R of them, their target is final of t+1

Knows nothing of the head. Invariant: the batches of an epoch are a function of (records, seed,
epoch), so a position in them is a number and training resumes exactly.

Shapes: M answer rows of a batch, G prompt rows, A raw feature width, H target hidden size, K ids
kept per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafter_service.training.features import Recorded
from drafter_service.training.records import Record


@dataclass(frozen=True, slots=True)
class RecordRows:
    """Which flat rows of the batch belong to one record."""

    prompt: slice
    answer: slice


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat rows of several records; `ids` of a row is the token after its feature."""

    records: tuple[RecordRows, ...]
    prompt_features: Tensor  # [G, A]
    prompt_ids: Tensor  # [G]
    prompt_positions: Tensor  # [G]
    features: Tensor  # [M, A]
    ids: Tensor  # [M]
    positions: Tensor  # [M]
    final: Tensor  # [M, H], lm_head input whose distribution row m predicts at step 0
    top_ids: Tensor  # [M, K] int64, the target's most likely ids at `final`, falling
    top_logps: Tensor  # [M, K] float32, their log-probabilities over its whole vocabulary
    choices: Tensor  # [M], target id of the target's argmax at `final`, -1 if there is none
    last_row: Tensor  # [M], last flat answer row of the same record
    keys: Tensor  # [M] int64, names the row in all batches: what `draws` draws by

    @property
    def num_rows(self) -> int:
        return len(self.ids)


class FeatureReader(Protocol):
    """Recorded states of a record, by its place in the list of records."""

    def read(self, record_index: int, layers: Sequence[int]) -> Recorded:
        """Its aux states are those of `layers`, low to high."""


def split_share(indices: Sequence[int], rank: int, num_workers: int) -> tuple[int, ...]:
    """The records of an update that fall to one worker: every `num_workers`th of them."""
    return tuple(indices[rank::num_workers])


def epoch_batches(
    records: Sequence[Record], indices: Sequence[int], rows_per_batch: int, seed: int, epoch: int
) -> list[tuple[int, ...]]:
    """Record indices of every batch of an epoch: shuffled records until the rows are reached."""
    rng = np.random.default_rng([seed, epoch])
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    rows = 0
    for index in (indices[i] for i in rng.permutation(len(indices))):
        if current and rows + records[index].answer_len > rows_per_batch:
            batches.append(tuple(current))
            current, rows = [], 0
        current.append(index)
        rows += records[index].answer_len
    batches.append(tuple(current))
    return batches


def load_batch(
    records: Sequence[Record],
    indices: Sequence[int],
    store: FeatureReader,
    layers: Sequence[int],
    eos_id: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """Read one batch's rows, states in `dtype`; see the module's diagram for the alignment.

    Nothing follows an end of text, so its row has no choice.
    """
    parts: list[dict[str, Tensor]] = []
    rows: list[RecordRows] = []
    num_prompt = num_answer = 0
    for index in indices:
        part = _record_rows(records[index], store.read(index, layers), eos_id)
        prompt = slice(num_prompt, num_prompt + len(part["prompt_ids"]))
        answer = slice(num_answer, num_answer + len(part["ids"]))
        part["last_row"] = torch.full((len(part["ids"]),), answer.stop - 1)
        parts.append(part)
        rows.append(RecordRows(prompt=prompt, answer=answer))
        num_prompt, num_answer = prompt.stop, answer.stop
    flat = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for name in ("prompt_features", "features", "final"):
        flat[name] = flat[name].to(dtype)
    return Batch(records=tuple(rows), **flat)


def _record_rows(record: Record, recorded: Recorded, eos_id: int) -> dict[str, Tensor]:
    ids = torch.from_numpy(record.ids)
    first, stop = record.prompt_len - 1, len(record.ids) - 1
    top_ids = recorded.top_ids[1:].to(torch.int64)
    return {
        "prompt_features": recorded.aux[:first],
        "prompt_ids": ids[1 : first + 1],
        "prompt_positions": torch.arange(first),
        "features": recorded.aux[first:stop],
        "ids": ids[first + 1 :],
        "positions": torch.arange(first, stop),
        "final": recorded.final[first + 1 :],
        "top_ids": top_ids,
        "top_logps": recorded.top_logps[1:].float(),
        "choices": top_ids[:, 0].masked_fill(ids[first + 1 :] == eos_id, -1),
        "keys": (record.index << 24) + torch.arange(first, stop),
    }

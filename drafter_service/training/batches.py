"""Training batches: whole records, laid out flat, prompt rows apart from answer rows.

    tokens    x0 .. x(P-1) | xP ........ x(P+R-1)          P prompt, R answer tokens
    row t   = (aux of token t, token t+1), predicts token t+2
    prompt rows  t = 0 .. P-2           keys and values only
    answer rows  t = P-1 .. P+R-2       queries too; R of them, their target is final of t+1

Knows nothing of the head. Invariant: the batches of an epoch are a function of (records, seed,
epoch), so a position in them is a number and training resumes exactly.

Shapes: M answer rows of a batch, G prompt rows, A raw feature width, H target hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

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
    choices: Tensor  # [M], target id of the target's argmax at `final`, -1 if there is none
    last_row: Tensor  # [M], last flat answer row of the same record

    @property
    def num_rows(self) -> int:
        return len(self.ids)


class FeatureReader(Protocol):
    """Recorded states of a record, by its place in the list of records."""

    def read(self, record_index: int, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(aux [N, len(layers) * H], final [N, H]), bf16."""


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
    choices: Sequence[Tensor],
    indices: Sequence[int],
    store: FeatureReader,
    layers: Sequence[int],
    eos_id: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """Read one batch's rows, states in `dtype`; see the module's diagram for the alignment.

    Nothing follows an end of text, so its row has no choice.
    """
    parts: dict[str, list[Tensor]] = {
        name: []
        for name in ("p_feat", "p_ids", "p_pos", "feat", "ids", "pos", "final", "best", "last_row")
    }
    rows: list[RecordRows] = []
    num_prompt = num_answer = 0
    for index in indices:
        record = records[index]
        aux, final = store.read(index, layers)
        ids = torch.from_numpy(record.ids)
        first, stop = record.prompt_len - 1, len(record.ids) - 1
        parts["p_feat"].append(aux[:first])
        parts["p_ids"].append(ids[1 : first + 1])
        parts["p_pos"].append(torch.arange(first))
        parts["feat"].append(aux[first:stop])
        parts["ids"].append(ids[first + 1 :])
        parts["pos"].append(torch.arange(first, stop))
        parts["final"].append(final[first + 1 :])
        parts["best"].append(
            choices[index][first + 1 :].masked_fill(ids[first + 1 :] == eos_id, -1)
        )
        prompt = slice(num_prompt, num_prompt + first)
        answer = slice(num_answer, num_answer + stop - first)
        parts["last_row"].append(torch.full((stop - first,), answer.stop - 1))
        rows.append(RecordRows(prompt=prompt, answer=answer))
        num_prompt, num_answer = prompt.stop, answer.stop
    flat = {name: torch.cat(tensors) for name, tensors in parts.items()}
    return Batch(
        records=tuple(rows),
        prompt_features=flat["p_feat"].to(dtype),
        prompt_ids=flat["p_ids"],
        prompt_positions=flat["p_pos"],
        features=flat["feat"].to(dtype),
        ids=flat["ids"],
        positions=flat["pos"],
        final=flat["final"].to(dtype),
        choices=flat["best"],
        last_row=flat["last_row"],
    )

"""The target's own choice after every recorded token: the argmax over its whole vocabulary.

Losses skip rows whose choice cannot be drafted; evaluation needs to know which answers the target
wrote greedily. One safetensors file, `choices` [all tokens] int32 in record order. Knows no head.

Shapes: N tokens of a record, V target vocabulary, H target hidden size.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_service.training.features import FeatureStore
from drafter_service.training.records import Record

logger = logging.getLogger(__name__)

CHUNK_ROWS = 256
GREEDY_SHARE = 0.95  # recorded answers come from other kernels, so a few near-ties differ


def write_choices(
    records: Sequence[Record],
    store: FeatureStore,
    lm_head_VH: Tensor,
    path: Path,
    report: Callable[[str], None] = logger.info,
) -> None:
    """Compute and store the choices of all records; rows of a prompt but its last hold -1."""
    parts: list[Tensor] = []
    started = time.monotonic()
    lm_head_VH = lm_head_VH.to(torch.bfloat16)  # the dtype of recorded states
    done, total = 0, sum(record.answer_len for record in records)
    for number, record in enumerate(records):
        _, final_NH = store.read(number)
        choices = torch.full((len(record.ids),), -1, dtype=torch.int32)
        for start in range(record.prompt_len - 1, len(record.ids), CHUNK_ROWS):
            logits = final_NH[start : start + CHUNK_ROWS] @ lm_head_VH.T
            choices[start : start + CHUNK_ROWS] = logits.max(-1).indices.to(torch.int32)
        parts.append(choices)
        done += record.answer_len
        if number % 200 == 199:
            rate = done / (time.monotonic() - started)
            report(f"choices: {done}/{total}, {rate:.0f}/s, {(total - done) / rate:.0f} s left")
    temporary = path.with_suffix(".tmp")
    save_file({"choices": torch.cat(parts)}, temporary)
    os.replace(temporary, path)


def read_choices(records: Sequence[Record], path: Path) -> list[Tensor]:
    """[N] int64 for every record: the target's choice after each of its tokens, -1 if unknown."""
    flat = load_file(path)["choices"].to(torch.int64)
    expected = sum(len(record.ids) for record in records)
    if len(flat) != expected:
        raise ValueError(f"choices of {len(flat)} tokens, the records have {expected}")
    ends = np.cumsum([len(record.ids) for record in records])[:-1]
    return list(flat.tensor_split(torch.from_numpy(ends)))


def is_greedy(record: Record, choices_N: Tensor) -> bool:
    """Whether the target wrote this answer by taking its argmax."""
    answer = torch.from_numpy(record.ids[record.prompt_len :])
    agreed = choices_N[record.prompt_len - 1 : -1] == answer
    return bool(agreed.float().mean() >= GREEDY_SHARE)

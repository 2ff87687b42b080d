"""The draft vocabulary: the ids most frequent in recorded answers, ascending.

When answers show fewer distinct ids than asked for, the lowest unused ids fill the rest
(`reference/eagle.md` 4.3). Ties in frequency go to the lower id. Knows no model.

Shapes: W draft vocabulary, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter_service.training.records import Record


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Kept target ids, ascending, and the share of answer tokens they cover."""

    target_ids: npt.NDArray[np.int64]  # [W]
    coverage: float


def choose_draft_vocab(
    records: Sequence[Record], vocab_size: int, draft_vocab_size: int
) -> DraftVocab:
    """The `draft_vocab_size` most frequent answer ids of `records`."""
    if not 0 < draft_vocab_size <= vocab_size:
        raise ValueError(f"draft vocabulary of {draft_vocab_size} ids out of {vocab_size}")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for record in records:
        counts += np.bincount(record.ids[record.prompt_len :], minlength=vocab_size)
    # Stable sort on negated counts: ties, and the unused tail, in ascending order of id.
    kept = np.sort(np.argsort(-counts, kind="stable")[:draft_vocab_size]).astype(np.int64)
    return DraftVocab(target_ids=kept, coverage=float(counts[kept].sum() / max(1, counts.sum())))


def draft_index(target_ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int64]:
    """[V]: the draft id of every target id, -1 for ids that cannot be drafted."""
    index = np.full(vocab_size, -1, dtype=np.int64)
    index[target_ids] = np.arange(len(target_ids))
    return index

"""What a run reads: records, the target's states and choices, and the split.

Knows the settings; knows no head and no optimiser. Invariant: held-out records never reach a
training batch, nor the choice of the draft vocabulary.
"""

import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.training.batches import Batch, epoch_batches, load_batch
from drafter_service.training.choices import is_greedy
from drafter_service.training.features import FeatureStore, Recorded
from drafter_service.training.records import (
    Record,
    Split,
    read_records,
    share_of,
    split_records,
    without_shared_prompts,
)
from drafter_service.training.settings import TrainSettings
from drafter_service.training.vocab import DraftVocab, choose_draft_vocab
from protos.features import FINAL_LAYER

HELD_OUT_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Part:
    """One answers file: its records, numbered over all files, and the folder of its features."""

    records: list[Record]
    features: Path


def parts(settings: TrainSettings) -> list[Part]:
    """Every answers file of a run, in order."""
    found: list[Part] = []
    first = 0
    for path in settings.answers:
        records = read_records(path, first)
        found.append(Part(records, settings.features / path.stem))
        first += len(records)
    return found


class JoinedStore:
    """The features of all parts, by the number of a record over all files."""

    def __init__(self, found: Sequence[Part]) -> None:
        self._stores = [FeatureStore(part.features) for part in found]
        self._firsts = [0, *itertools.accumulate(len(part.records) for part in found)]

    def read(self, record_index: int, layers: Sequence[int]) -> Recorded:
        """See `FeatureStore.read`."""
        part = bisect_right(self._firsts, record_index) - 1
        return self._stores[part].read(record_index - self._firsts[part], layers)


class Data:
    """Records, what the target said about them, and the split. Batches in the run's dtype."""

    def __init__(self, settings: TrainSettings) -> None:
        found = parts(settings)
        self.records: list[Record] = [record for part in found for record in part.records]
        self.store = JoinedStore(found)
        split = split_records(len(self.records), settings.held_out_share, settings.seed)
        self.split: Split = share_of(
            without_shared_prompts(self.records, split), settings.train_share, settings.seed
        )
        self.target_config = json.loads((settings.target / "config.json").read_text())
        self._settings = settings

    def vocab(self, size: int) -> DraftVocab:
        """The `size` most frequent ids of the training answers."""
        answers = [self.records[index] for index in self.split.train]
        return choose_draft_vocab(answers, self.target_config["vocab_size"], size)

    def load(self, indices: Sequence[int]) -> Batch:
        eos_id = int(self.target_config["eos_token_id"])
        dtype: torch.dtype = getattr(torch, self._settings.compute_dtype)
        layers = self._settings.layers
        return load_batch(self.records, indices, self.store, layers, eos_id, dtype)

    def epoch(self, epoch: int) -> list[tuple[int, ...]]:
        rows = self._settings.rows_per_update
        return epoch_batches(self.records, self.split.train, rows, self._settings.order_seed, epoch)

    def held_out(self) -> Iterator[tuple[Batch, tuple[bool, ...]]]:
        for indices in epoch_batches(self.records, self.split.held_out, HELD_OUT_ROWS, 0, 0):
            greedy = tuple(self._is_greedy(index) for index in indices)
            yield self.load(indices), greedy

    def _is_greedy(self, index: int) -> bool:
        return is_greedy(self.records[index], self.store.read(index, (FINAL_LAYER,)).top_ids)

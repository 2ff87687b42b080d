"""What the target says about recorded answers: aux states, final states, its best ids.

A shard is a safetensors file of rows of whole records one after the other:

    aux        [N, n_aux * H] bf16   raw residual streams after the aux layers, low to high
    final      [N, H] bf16           the state after the last norm, the input of lm_head
    top_ids    [A, 64] int32         the target's most likely next ids, falling
    top_logps  [A, 64] float16       their log-probabilities over its whole vocabulary

The last two exist for the rows that predict answer tokens or what follows them (the prompt's last
row onwards). `index.json` says which rows of which shard belong to which record. Knows nothing of
heads or losses. Invariant: the index lists complete shards only, so an interrupted run resumes
after the last one.

Shapes: N tokens, A rows from the prompt's last on, B records of a batch, T padded length, H target
hidden size, V target vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from protos.features import FINAL_LAYER


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, start + num_rows) of a shard, and of its lists of best ids."""

    shard: str
    start: int
    num_rows: int
    top_start: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """One record's states and lists."""

    aux: Tensor  # [N, n_aux * H] bf16
    final: Tensor  # [N, H] bf16
    top_ids: Tensor  # [A, 64] int32
    top_logps: Tensor  # [A, 64] float16


class _Slice(Protocol):
    def __getitem__(self, rows: slice) -> Tensor: ...


class _Shard(Protocol):
    def get_slice(self, name: str) -> _Slice: ...


class FeatureStore:
    """Random access to the rows of any record; shards stay memory-mapped."""

    def __init__(self, directory: Path) -> None:
        index = json.loads((directory / "index.json").read_text())
        self.aux_layers: tuple[int, ...] = tuple(index["aux_layers"])
        self.hidden_size: int = index["hidden_size"]
        self._rows = {int(key): RowRange(*value) for key, value in index["records"].items()}
        self._directory = directory
        self._open: dict[str, _Shard] = {}

    def __contains__(self, record_index: int) -> bool:
        return record_index in self._rows

    def read(self, record_index: int, layers: Sequence[int] | None = None) -> Recorded:
        """One record; all recorded layers by default, FINAL_LAYER standing for `final`."""
        rows = self._rows[record_index]
        shard = self._shard(rows.shard)
        stop, top_stop = rows.start + rows.num_rows, rows.top_start + rows.num_top
        final_NH = shard.get_slice("final")[rows.start : stop]
        top_ids = shard.get_slice("top_ids")[rows.top_start : top_stop]
        top_logps = shard.get_slice("top_logps")[rows.top_start : top_stop]
        if layers is not None and tuple(layers) == (FINAL_LAYER,):
            return Recorded(final_NH, final_NH, top_ids, top_logps)
        aux_NA = shard.get_slice("aux")[rows.start : stop]
        if layers is not None and tuple(layers) != self.aux_layers:
            aux_NA = self._select(aux_NA, layers)
        return Recorded(aux_NA, final_NH, top_ids, top_logps)

    def _select(self, aux_NA: Tensor, layers: Sequence[int]) -> Tensor:
        missing = [layer for layer in layers if layer not in self.aux_layers]
        if missing:
            raise ValueError(f"aux layers {missing} were not recorded, only {self.aux_layers}")
        parts = aux_NA.chunk(len(self.aux_layers), dim=1)
        return torch.cat([parts[self.aux_layers.index(layer)] for layer in layers], dim=1)

    def _shard(self, name: str) -> _Shard:
        if name not in self._open:
            self._open[name] = safe_open(self._directory / name, framework="pt")
        return self._open[name]

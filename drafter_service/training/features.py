"""What the target says about recorded answers: aux states and final states, written as shards.

A shard is a safetensors file with `aux` [N, n_aux * H] (raw residual streams after the aux
layers, concatenated low to high) and `final` [N, H] (the state after the last norm, the input of
lm_head), both bf16, rows of whole records one after the other. `index.json` says which rows of
which shard belong to which record. Knows nothing of heads or losses. Invariant: the index lists
complete shards only, so an interrupted run resumes after the last one.

Shapes: N tokens, B records of a batch, T padded length, H target hidden size.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter_service.training.records import Record, pack_by_length

logger = logging.getLogger(__name__)

MAX_PADDED_TOKENS = 4096
BATCHES_PER_SHARD = 10

Hidden = Tensor | tuple[Tensor, ...]
"""What a decoder layer returns; the hidden state is the tensor, or the first of the tuple."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, start + num_rows) of a shard."""

    shard: str
    start: int
    num_rows: int


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

    def read(self, record_index: int, layers: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """(aux [N, len(layers) * H], final [N, H]) of one record, bf16; all layers by default."""
        rows = self._rows[record_index]
        shard = self._shard(rows.shard)
        stop = rows.start + rows.num_rows
        aux_NA = shard.get_slice("aux")[rows.start : stop]
        final_NH = shard.get_slice("final")[rows.start : stop]
        if layers is not None and tuple(layers) != self.aux_layers:
            aux_NA = self._select(aux_NA, layers)
        return aux_NA, final_NH

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


def write_features(
    model: torch.nn.Module,
    records: Sequence[Record],
    aux_layers: Sequence[int],
    directory: Path,
    report: Callable[[str], None] = logger.info,
) -> None:
    """Run the target over every record and write shards; continue where an earlier run stopped.

    `model` is a transformers decoder without its lm_head (`AutoModel`, or `.model` of a causal
    LM): it has `layers`, and its `last_hidden_state` is the state after the final norm.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lengths = [len(record.ids) for record in records]
    order = sorted(range(len(records)), key=lambda index: -lengths[index])
    batches = pack_by_length(lengths, order, MAX_PADDED_TOKENS)
    groups = [batches[i : i + BATCHES_PER_SHARD] for i in range(0, len(batches), BATCHES_PER_SHARD)]
    hidden_size = int(model.config.hidden_size)  # type: ignore[union-attr,arg-type]
    index = _load_index(directory, aux_layers, hidden_size)
    total, done, started, computed = sum(lengths), 0, time.monotonic(), 0
    for number, group in enumerate(groups):
        name = f"shard-{number:04d}.safetensors"
        num_tokens = sum(lengths[record] for batch in group for record in batch)
        done += num_tokens
        if name in index["shards"]:
            continue
        _write_shard(model, records, group, aux_layers, directory, name, index)
        computed += num_tokens
        rate = computed / (time.monotonic() - started)
        left_s = (total - done) / rate
        report(f"features: {done}/{total} tokens, {rate:.0f} tokens/s, {left_s:.0f} s left")


def _load_index(directory: Path, aux_layers: Sequence[int], hidden_size: int) -> dict[str, Any]:
    path = directory / "index.json"
    fresh = {"aux_layers": list(aux_layers), "hidden_size": hidden_size}
    if not path.exists():
        return {**fresh, "shards": [], "records": {}}
    index: dict[str, Any] = json.loads(path.read_text())
    if {key: index[key] for key in fresh} != fresh:
        raise ValueError(f"{path} was written for other aux layers or another target: {fresh}")
    return index


def _write_shard(
    model: torch.nn.Module,
    records: Sequence[Record],
    group: Sequence[Sequence[int]],
    aux_layers: Sequence[int],
    directory: Path,
    name: str,
    index: dict[str, Any],
) -> None:
    aux_parts: list[Tensor] = []
    final_parts: list[Tensor] = []
    start = 0
    for batch in group:
        states = target_states(model, [records[i] for i in batch], aux_layers)
        for record_index, (aux_NA, final_NH) in zip(batch, states, strict=True):
            aux_parts.append(aux_NA)
            final_parts.append(final_NH)
            index["records"][str(record_index)] = [name, start, len(aux_NA)]
            start += len(aux_NA)
    tensors = {"aux": torch.cat(aux_parts), "final": torch.cat(final_parts)}
    _replace(directory / name, lambda path: save_file(tensors, path))
    index["shards"].append(name)
    _replace(directory / "index.json", lambda path: path.write_text(json.dumps(index)))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    write(temporary)
    os.replace(temporary, path)


@torch.inference_mode()
def target_states(
    model: torch.nn.Module, records: Sequence[Record], aux_layers: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """(aux [N, n_aux * H], final [N, H]) in bf16 for each record, from one right-padded batch."""
    longest = max(len(record.ids) for record in records)
    ids_BT = torch.zeros(len(records), longest, dtype=torch.long)
    for row, record in enumerate(records):
        ids_BT[row, : len(record.ids)] = torch.from_numpy(record.ids)
    captured: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[[torch.nn.Module, object, Hidden], None]:
        def hook(_module: torch.nn.Module, _inputs: object, output: Hidden) -> None:
            captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    layers: torch.nn.ModuleList = model.layers  # type: ignore[assignment]
    handles = [layers[layer].register_forward_hook(keep(layer)) for layer in aux_layers]
    try:
        # Right padding under a causal mask: no real token sees a padded one.
        final_BTH = model(input_ids=ids_BT, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    aux_BTA = torch.cat([captured[layer] for layer in aux_layers], dim=-1).to(torch.bfloat16)
    final_BTH = final_BTH.to(torch.bfloat16)
    return [
        (aux_BTA[row, : len(record.ids)].clone(), final_BTH[row, : len(record.ids)].clone())
        for row, record in enumerate(records)
    ]

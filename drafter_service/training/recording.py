"""Runs the target over recorded answers and writes what it says as shards (`features`).

Right-padded batches of similar length; states are taken by hooks. Knows nothing of heads or losses.
Invariant: a shard and then the index appear whole, so an interrupted run resumes after the last.

Shapes: N tokens, A rows from the prompt's last on, B records of a batch, T padded length, H target
hidden size, K ids kept per row, V target vocabulary.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter_service.training.features import Recorded
from drafter_service.training.records import Record, pack_by_length
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

VERSION = 2
NUM_TOP = 64
CHUNK_ROWS = 256
MAX_PADDED_TOKENS = 4096
BATCHES_PER_SHARD = 10

Hidden = Tensor | tuple[Tensor, ...]
"""What a decoder layer returns; the hidden state is the tensor, or the first of the tuple."""


def write_features(
    model: torch.nn.Module,
    lm_head_VH: Tensor,
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
    lm_head_VH = lm_head_VH.to(torch.bfloat16)  # the dtype of recorded states
    total, done, started, computed = sum(lengths), 0, time.monotonic(), 0
    for number, group in enumerate(groups):
        name = f"shard-{number:04d}.safetensors"
        num_tokens = sum(lengths[record] for batch in group for record in batch)
        done += num_tokens
        if name in index["shards"]:
            continue
        _write_shard(model, lm_head_VH, records, group, aux_layers, directory, name, index)
        computed += num_tokens
        rate = computed / (time.monotonic() - started)
        left_s = (total - done) / rate
        report(f"features: {done}/{total} tokens, {rate:.0f} tokens/s, {left_s:.0f} s left")


def _load_index(directory: Path, aux_layers: Sequence[int], hidden_size: int) -> dict[str, Any]:
    path = directory / "index.json"
    fresh = {"version": VERSION, "aux_layers": list(aux_layers), "hidden_size": hidden_size}
    if not path.exists():
        return {**fresh, "shards": [], "records": {}}
    index: dict[str, Any] = json.loads(path.read_text())
    if {key: index.get(key) for key in fresh} != fresh:
        raise ConfigError(
            f"{path.name} in {directory.name} was written by another version, for other aux layers "
            f"or another target than {fresh}"
        )
    return index


def _write_shard(
    model: torch.nn.Module,
    lm_head_VH: Tensor,
    records: Sequence[Record],
    group: Sequence[Sequence[int]],
    aux_layers: Sequence[int],
    directory: Path,
    name: str,
    index: dict[str, Any],
) -> None:
    parts: list[Recorded] = []
    start = top_start = 0
    for batch in group:
        states = target_states(model, [records[i] for i in batch], aux_layers)
        for record_index, (aux_NA, final_NH) in zip(batch, states, strict=True):
            first = records[record_index].prompt_len - 1
            top_ids, top_logps = best_ids(final_NH[first:], lm_head_VH)
            parts.append(Recorded(aux_NA, final_NH, top_ids, top_logps))
            rows = [name, start, len(aux_NA), top_start, len(top_ids)]
            index["records"][str(record_index)] = rows
            start, top_start = start + len(aux_NA), top_start + len(top_ids)
    tensors = {
        "aux": torch.cat([part.aux for part in parts]),
        "final": torch.cat([part.final for part in parts]),
        "top_ids": torch.cat([part.top_ids for part in parts]),
        "top_logps": torch.cat([part.top_logps for part in parts]),
    }
    _replace(directory / name, lambda path: save_file(tensors, path))
    index["shards"].append(name)
    _replace(directory / "index.json", lambda path: path.write_text(json.dumps(index)))


@torch.inference_mode()
def best_ids(final_AH: Tensor, lm_head_VH: Tensor) -> tuple[Tensor, Tensor]:
    """(top_ids [A, 64] int32, top_logps [A, 64] float16), ties to the lower id at the top."""
    count = min(NUM_TOP, len(lm_head_VH))
    ids = torch.empty(len(final_AH), count, dtype=torch.int32)
    logps = torch.empty(len(final_AH), count, dtype=torch.float16)
    for start in range(0, len(final_AH), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        logits = (final_AH[rows] @ lm_head_VH.T).float()
        values, best = logits.topk(count)
        best = first_best(logits, values, best)
        ids[rows] = best.to(torch.int32)
        logps[rows] = (values - logits.logsumexp(-1, keepdim=True)).to(torch.float16)
    return ids, logps


def first_best(logits_NV: Tensor, values_NK: Tensor, ids_NK: Tensor) -> Tensor:
    """topk's ids with the lowest of equally good ids in front: the target's own choice.

    bf16 logits tie often and topk orders ties as it likes.
    """
    tied_N = values_NK[:, 0] == values_NK[:, min(1, values_NK.shape[1] - 1)]
    if not tied_N.any():
        return ids_NK
    ids_NK = ids_NK.clone()
    for row in tied_N.nonzero().flatten().tolist():
        lowest = int(logits_NV[row].argmax())
        place = (ids_NK[row] == lowest).nonzero().flatten()
        ids_NK[row, int(place[0]) if len(place) else -1] = ids_NK[row, 0]
        ids_NK[row, 0] = lowest
    return ids_NK


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

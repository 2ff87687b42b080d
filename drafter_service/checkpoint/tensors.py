"""Tensors of a described checkpoint, whatever its family: one by name, and the vocabulary map.

Reads safetensors only. Invariant: a map that comes out names each target id at most once.

Shapes: V target vocabulary, W draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_service.checkpoint.description import CheckpointDescription
from protos.errors import CheckpointError


def read_tensor(directory: Path, described: CheckpointDescription[Any], name: str) -> Tensor:
    """The tensor that the files call `name`."""
    with safe_open(directory / described.tensors[name].file, framework="pt") as stream:
        tensor: Tensor = stream.get_tensor(name)
    return tensor


def read_target_ids(directory: Path, described: CheckpointDescription[Any]) -> Tensor:
    """[W] target id of every draft id: i + d2t[i], or the identity; checked against t2d."""
    ids_W = torch.arange(described.draft_vocab_size)
    names = {name.removeprefix("model."): name for name in described.tensors}
    if "d2t" in names:
        offsets_W = read_tensor(directory, described, names["d2t"])
        if offsets_W.is_floating_point():
            raise CheckpointError(f"d2t: expected integers, got {offsets_W.dtype}")
        ids_W = ids_W + offsets_W.to(torch.int64)
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= described.vocab_size:
        raise CheckpointError(f"d2t leads outside the vocabulary of {described.vocab_size}")
    if len(set(ids_W.tolist())) != len(ids_W):
        raise CheckpointError("d2t maps two draft ids to one target id")
    if "t2d" in names:
        kept_V = read_tensor(directory, described, names["t2d"]).to(torch.bool)
        expected_V = torch.zeros(described.vocab_size, dtype=torch.bool)
        expected_V[ids_W] = True
        if not torch.equal(kept_V, expected_V):
            raise CheckpointError("t2d and d2t name different target ids")
    return ids_W

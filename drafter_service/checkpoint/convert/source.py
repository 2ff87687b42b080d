"""A checkpoint as its reader understands it, with its tensors: what a conversion starts from.

Knows no layout to write. Invariant: every tensor of the file that the reader uses is here, bit for
bit, under our parameter's name; the vocabulary maps are here under their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.description import CheckpointDescription

MAPS = ("d2t", "t2d")


@dataclass(frozen=True, slots=True)
class Source:
    """weights: by our parameter names. maps: d2t and t2d as the file has them."""

    described: CheckpointDescription[Any]
    weights: Mapping[str, Tensor]
    maps: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        """Element type of the weights, as configs call it."""
        first = next(iter(self.weights.values()))
        return str(first.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint in another layout. notes: what its reader must know, for people."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()


def read_source(directory: Path, num_target_layers: int | None, variant: str) -> Source:
    """Raises CheckpointError when the checkpoint cannot be read."""
    described = describe(directory, num_target_layers).choose(variant)
    maps = {n.removeprefix("model."): n for n in described.tensors}
    return Source(
        described,
        {ours: _read(directory, described, name) for ours, name in described.names.items()},
        {name: _read(directory, described, maps[name]) for name in MAPS if name in maps},
    )


def _read(directory: Path, described: CheckpointDescription[Any], name: str) -> Tensor:
    with safe_open(directory / described.tensors[name].file, framework="pt") as stream:
        tensor: Tensor = stream.get_tensor(name)
    return tensor

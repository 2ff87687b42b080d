"""What every family of drafter checkpoints has in common, as values. Torch-free.

`CheckpointFiles` is what a directory states (config.json, names and shapes of tensors);
`CheckpointDescription` is what a family reads out of it. A `Family` turns one into the other.
Knows no format. Invariant: aux layers are design 2's (outputs, from 0; FINAL_LAYER for the state
after the target's last norm), whatever the file's own convention is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from drafter_service.checkpoint.safetensors_header import TensorInfo
from protos.features import ProjectionSpec

Json = Mapping[str, Any]
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """`num_target_layers` is None where the target is not known."""

    directory: Path
    config: Json
    tensors: dict[str, TensorInfo]
    num_target_layers: int | None = None

    @property
    def bare_names(self) -> dict[str, str]:
        """{name without a leading `model.`: name in the file}."""
        return {name.removeprefix("model."): name for name in self.tensors}


@dataclass(frozen=True, slots=True)
class CheckpointDescription(Generic[C]):
    """kind: the drafter kind that loads it. format: the public layout it is written in.

    config: every fact of the family. names: {parameter of our module: tensor of the files}.
    projection: how a verifier makes fused rows, None when there is nothing to project.
    aux_candidates: set only when the file's convention is unknown; `aux_layers` is its first.
    """

    kind: str
    format: str
    digest: str
    config: C
    names: dict[str, str]
    tensors: dict[str, TensorInfo]
    projection: ProjectionSpec | None
    aux_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    own_embedding: bool
    own_lm_head: bool
    aux_candidates: tuple[tuple[int, ...], ...] = ()

    @property
    def aux_convention(self) -> str:
        """`known`, or `unknown` when all `aux_candidates` must be tried on a text."""
        return "unknown" if self.aux_candidates else "known"

    def with_aux_layers(self, aux_layers: tuple[int, ...]) -> "CheckpointDescription[C]":
        """The same checkpoint with one candidate chosen, nothing left open."""
        projection = self.projection
        if projection is not None:
            projection = replace(projection, aux_layers=aux_layers)
        return replace(self, projection=projection, aux_layers=aux_layers, aux_candidates=())


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint. `recognise` looks at keys and names only and never raises."""

    name: str
    recognise: Callable[[CheckpointFiles], bool]
    describe: Callable[[CheckpointFiles], CheckpointDescription[Any]]

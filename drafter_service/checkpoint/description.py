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
from protos.errors import CheckpointError
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
class Variant(Generic[C]):
    """One way a checkpoint may have been meant, where its files leave that open."""

    label: str
    config: C
    aux_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointDescription(Generic[C]):
    """kind: the drafter kind that loads it. format: the public layout it is written in.

    config: every fact of the family. names: {parameter of our module: tensor of the files}.
    projection: how a verifier makes fused rows, None when there is nothing to project.
    variants: empty where the files say everything. Else all readings, to be scored on a text;
    the first is what this description says.
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
    variants: tuple[Variant[C], ...] = ()

    @property
    def aux_candidates(self) -> tuple[tuple[int, ...], ...]:
        """The aux layers it may eat, the likelier first; empty where the file says them."""
        found = tuple(dict.fromkeys(variant.aux_layers for variant in self.variants))
        return found if len(found) > 1 else ()

    @property
    def aux_convention(self) -> str:
        """`known`, or `unknown` when all `aux_candidates` must be tried on a text."""
        return "unknown" if self.aux_candidates else "known"

    def choose(self, label: str) -> "CheckpointDescription[C]":
        """The same checkpoint read in one way, nothing left open. "" is the first.

        Raises CheckpointError for a reading it does not have.
        """
        for variant in self.variants:
            if variant.label == label:
                return replace(
                    self,
                    config=variant.config,
                    projection=self.projection
                    and replace(self.projection, aux_layers=variant.aux_layers),
                    aux_layers=variant.aux_layers,
                    variants=(),
                )
        if label:
            known = ", ".join(repr(variant.label) for variant in self.variants) or "none"
            raise CheckpointError(f"the checkpoint has no variant {label!r}; it has {known}")
        return replace(self, variants=())


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint. `recognise` looks at keys and names only and never raises."""

    name: str
    recognise: Callable[[CheckpointFiles], bool]
    describe: Callable[[CheckpointFiles], CheckpointDescription[Any]]

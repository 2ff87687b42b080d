"""What one step is made of: spans of many requests, and what a target must offer to run them.

Shared by `engine` (which fills spans) and `model` (which runs them); holds no state. A span is a
prompt chunk or a candidate tree; plain decoding is a tree that holds only the anchor.

Shapes: R rows of a span, P positions already in the pool, V vocabulary, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from protos.features import DType, ProjectionSpec


@dataclass(frozen=True, slots=True)
class Span:
    """One request's share of a step.

        positions   0 ............ start-1 | start ...
        slots       [ written before       | rows of this span, in row order ]

    token_ids: [R]. slots: int64 CPU tensor [start + R]; slots[start + r] receives row r's KV.
    parents: None when row r follows row r - 1 (prompt chunk, chain); else the parent's row number
    per row, -1 for row 0. A row at depth d below row 0 stands at position start + d and sees
    positions [0, start), its ancestors and itself. Logits are returned for the last num_logits
    rows. first_slot: set when the slots are one ascending run, so that no gather is needed.
    """

    key: int
    token_ids: tuple[int, ...]
    start: int
    slots: torch.Tensor
    parents: tuple[int, ...] | None = None
    num_logits: int = 0
    first_slot: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows in this span."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TapSpec:
    """Feature rows to keep beside the KV, under `key`.

    With a projection the row is fused (projection.width wide), else the raw concatenation of the
    aux layers, low to high.
    """

    key: str
    aux_layers: tuple[int, ...]
    projection: ProjectionSpec | None = None


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the engine must know of a target. Bytes per slot count K, V and all tap rows."""

    name: str
    digest: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: DType
    bytes_per_slot: int
    fingerprint: str
    invariant: bool
    invariance_note: str = ""


class Target(Protocol):
    """The target as the engine sees it. Used by one thread."""

    @property
    def facts(self) -> TargetFacts:
        """Constant after loading."""

    def allocate(self, num_slots: int) -> None:
        """Create the pool. Slot 0 is scrap: padding rows are written there."""

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Run one step; write KV and feature rows; return logits [sum num_logits, V]."""

    def tree_parts(self, parents: Sequence[int], start: int, most: int) -> Sequence[int]:
        """Which parts a branching span falls into, per row and from 0; a part reads [0, start).

        parents: as in Span. All 0 where its shape does not matter. Never below the parent's; the
        rows of the first n parts, in this order, take n. Rows without room in `most` are `most`.
        """

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy KV and feature rows between slots, all layers at once. int64 [n] each.

        Reads everything before it writes.
        """

    def read_rows(self, key: str, slots: torch.Tensor) -> bytes:
        """Feature rows of these slots, little-endian, in the target's row dtype."""

    def row_width(self, key: str) -> int:
        """Elements of one row under this tap; KeyError when rows are not kept under it."""

    def row_dtype(self, key: str) -> DType:
        """Element type of rows under this tap: the target's own."""

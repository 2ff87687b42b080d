"""The port of attention: what a decoder asks of a step, and what a backend provides.

Backends: tiles (attention.py, the reference), torch's fused kernel on CPUs (sdpa.py),
FlexAttention on GPUs (flex.py); backend.py chooses.

Shapes: R flat rows, A query heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from verifier_service.model.block_layout import BlockRules
from verifier_service.model.heads import AttentionShape, HeadRows, Scoring
from verifier_service.model.kv import Pool
from verifier_service.model.layout import StepLayout
from verifier_service.step import Span


class StepAttention(Protocol):
    """Attention of one step, for all layers of one shape."""

    def bind(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Say where scaled queries [R, A, D] come from and where outputs [R, A, D] go.

        Padding rows of `out` are left alone.
        """

    def attend(self, layer: int, scoring: Scoring) -> None:
        """Fill `out` for one layer; the step's own K and V of that layer are in the pool."""


class GroupAttention(Protocol):
    """Attention of one of a step's groups, with its query rows."""

    @property
    def queries(self) -> HeadRows:
        """Where its rows come from and go."""

    def attend(self, layer: int, scoring: Scoring) -> None:
        """StepAttention.attend for this group's rows."""


class GroupsAttention:
    """StepAttention of groups that attend one after the other."""

    def __init__(self, parts: Sequence[GroupAttention]) -> None:
        self._parts = parts

    def bind(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """StepAttention.bind."""
        for part in self._parts:
            part.queries.bind(queries, out)

    def attend(self, layer: int, scoring: Scoring) -> None:
        """StepAttention.attend."""
        for part in self._parts:
            part.attend(layer, scoring)


class PoolAttention(Protocol):
    """A backend at work on one pool; it may keep what helps the next step."""

    def order(self, spans: Sequence[Span]) -> Sequence[int]:
        """Numbers of a step's spans in the order in which they should lie in the flat batch."""

    def attention(self, layout: StepLayout, shape: AttentionShape) -> StepAttention:
        """This step's attention for layers of `shape`."""


class PlainAttention:
    """PoolAttention that keeps nothing."""

    def __init__(self, make: Callable[[StepLayout, AttentionShape], StepAttention]) -> None:
        self._make = make

    def order(self, spans: Sequence[Span]) -> Sequence[int]:
        """PoolAttention.order."""
        return range(len(spans))

    def attention(self, layout: StepLayout, shape: AttentionShape) -> StepAttention:
        """PoolAttention.attention."""
        return self._make(layout, shape)


class Backend(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """As in `Attention`; part of the fingerprint."""

    @property
    def rules(self) -> BlockRules | None:
        """How steps are laid out for it (layout.py)."""

    def over(self, pool: Pool) -> PoolAttention:
        """Attention over K and V of this pool."""

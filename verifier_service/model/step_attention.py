"""The port of attention: what a decoder asks of a step, and what a backend provides.

Backends: tiles (attention.py, the reference), torch's fused kernel on CPUs (sdpa.py),
FlexAttention on GPUs (flex.py); backend.py chooses.

Shapes: R flat rows, A query heads, D head_dim.
"""

from typing import Protocol

import torch

from verifier_service.model.block_layout import BlockRules
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.kv import Pool
from verifier_service.model.layout import StepLayout


class StepAttention(Protocol):
    """Attention of one step, for all layers of one shape."""

    def bind(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Say where scaled queries [R, A, D] come from and where outputs [R, A, D] go.

        Padding rows of `out` are left alone.
        """

    def attend(self, layer: int, scoring: Scoring) -> None:
        """Fill `out` for one layer; the step's own K and V of that layer are in the pool."""


class Backend(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """As in `Attention`; part of the fingerprint."""

    @property
    def rules(self) -> BlockRules | None:
        """How steps are laid out for it (layout.py)."""

    def attention(self, layout: StepLayout, shape: AttentionShape, pool: Pool) -> StepAttention:
        """This step's attention for layers of `shape`."""

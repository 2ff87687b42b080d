"""What the batcher asks of a head that drafts from features and its own feedback (EAGLE family).

Shapes: N rows, A raw feature width, C hidden size of the head, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from drafter_service.attention import Attend
from drafter_service.cache import Segment
from drafter_service.session import Session
from protos.exchange import SessionOpen


class FeatureHead(Protocol):
    """A head that drafts from features and its own feedback (the EAGLE family)."""

    def fuse(self, features_NA: Tensor) -> Tensor:
        """Raw feature rows to g [N, C]."""

    def step(
        self, token_ids_N: Tensor, g_NC: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """y [N, C] of rows."""

    def logits(self, y_NC: Tensor) -> Tensor:
        """Draft logits [N, W], float32."""

    def feedback(self, y_NC: Tensor) -> Tensor:
        """What the next step takes as g."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What a head puts in the rows it fills in one pass (P-EAGLE), instead of feeding itself."""

    token_id: int
    g_C: Tensor  # noqa: N815  # shape suffix


class HeadSession(Session):
    """A session with its place in the slab and y of its newest computed row."""

    def __init__(self, session_id: int, opened: SessionOpen) -> None:
        super().__init__(session_id, opened)
        self.segment: Segment | None = None
        self.newest_y_C: Tensor | None = None

    def rewind(self, computed_len: int) -> None:
        """Also take back the row before, because its y is not kept."""
        super().rewind(max(0, computed_len - 1))
        self.newest_y_C = None

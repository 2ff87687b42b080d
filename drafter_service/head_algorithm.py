"""A head of the EAGLE family as an algorithm: its slab of KV and the batcher that drafts with both.

Rows are taken raw or, where the head projects them, fused on the verifier; both lead to the same
g. Knows no head's insides, no file and no wire.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter_service.batcher import Batcher
from drafter_service.cache import KvSlab
from drafter_service.feature_head import FeatureHead, HeadSession, Mask
from drafter_service.service import Job, MakeRoom, Outcome
from protos.exchange import SessionOpen


class HeadAlgorithm:
    """Chains, dynamic trees and the static tree of one head."""

    def __init__(
        self,
        head: FeatureHead,
        slab: KvSlab,
        target_ids_W: Tensor,
        dtype: torch.dtype,
        windows: Sequence[int | None] = (None,),
        mask: Mask | None = None,
    ) -> None:
        """windows: per layer, see `attend_over`. mask: set for a head that fills masked rows."""
        self.slab = slab
        self.dtype = dtype
        self.batcher = Batcher(head, slab, target_ids_W, dtype, windows, mask)

    def create(self, session_id: int, opened: SessionOpen) -> HeadSession:
        """An empty session; it gets slots when it first computes."""
        return HeadSession(session_id, opened)

    def release(self, session: HeadSession) -> None:
        """Give the session's slots back."""
        self.slab.release(session.segment)
        session.segment = None

    def run(self, jobs: Sequence[Job[HeadSession]], make_room: MakeRoom) -> list[Outcome]:
        """See `Algorithm.run`."""
        return self.batcher.run(jobs, make_room)

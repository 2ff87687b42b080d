"""`eagle3` as an algorithm: a head, its slab of KV and the batcher that drafts with both.

Rows are taken raw (aux states, fused here) or fused (projected on the verifier); both lead to the
same g. Knows no file and no wire.
"""

from collections.abc import Sequence

import torch

from drafter_service.batcher import Batcher
from drafter_service.cache import KvSlab
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.packed import PackedHead
from drafter_service.feature_head import HeadSession, Mask
from drafter_service.service import Job, MakeRoom, Outcome
from protos.exchange import SessionOpen


class Eagle3:
    """Chains, dynamic and static trees of an EAGLE-3 or 3.1 head; in one pass for P-EAGLE."""

    def __init__(self, head: Eagle3Head, cache_bytes: int, max_positions: int) -> None:
        config = head.config
        weight = head.lm_head.weight
        self.head = head.eval().requires_grad_(False)
        self.slab = KvSlab(
            cache_bytes,
            config.num_kv_heads,
            config.head_dim,
            weight.dtype,
            weight.device,
            config.num_layers,
        )
        mask: Mask | None = None
        if config.mask_token_id is not None:
            with torch.inference_mode():
                mask = Mask(config.mask_token_id, self.head.masked())
        packed = PackedHead(self.head, max_positions)
        self.batcher = Batcher(
            packed, self.slab, head.target_ids, weight.dtype, config.windows, mask
        )

    @property
    def dtype(self) -> torch.dtype:
        """Compute type."""
        return self.head.lm_head.weight.dtype

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

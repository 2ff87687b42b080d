"""`dflash` and `dspark` as an algorithm: absorb context rows, then one pass of blocks for all.

    pass 1    new context rows of all sessions -> keys and values of every layer, kept in the slab
    pass 2    [anchor, mask, mask, ...] of all drafting sessions -> hidden states of every slot
    choosing  chains or trees out of those

The full block is computed whatever the plan asks, because fewer masks would change the
predictions; a shorter plan takes its prefix. Rows are taken raw (aux states, fused here) or fused
(projected on the verifier). Rows still under way are done without, up to MAX_MISSING. Knows no
file and no wire.

Shapes: N flat rows, C hidden size.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from drafter_service.cache import KvSlab
from drafter_service.dflash.attention import BlockShare, attend_blocks
from drafter_service.dflash.choosing import choose
from drafter_service.dflash.net import BlockNet
from drafter_service.dflash.packed import PackedBlock
from drafter_service.dflash.session import BlockDraft, BlockSession
from drafter_service.rows import decode_rows
from drafter_service.service import Job, MakeRoom, Outcome
from protos.exchange import DraftStatus, PlanKind, SessionOpen
from protos.features import FeatureForm, FeatureRows

MAX_MISSING = 8
"""Trailing rows that a draft does without: more than one round rarely leaves under way."""

ROWS_PER_FORWARD = 256
"""Rows of one session absorbed in one forward."""


class BlockDrafter:
    """Chains and trees out of the blocks of one net."""

    def __init__(self, net: BlockNet, cache_bytes: int, max_context: int) -> None:
        config = net.config
        self.net = net.eval().requires_grad_(False)
        self._device = net.fc.weight.device
        self.slab = KvSlab(
            cache_bytes,
            config.num_kv_heads,
            config.head_dim,
            net.dtype,
            self._device,
            num_layers=config.num_layers,
        )
        self._packed = PackedBlock(self.net, max_context + config.block_size)

    def create(self, session_id: int, opened: SessionOpen) -> BlockSession:
        """An empty session; it gets slots when it first computes."""
        return BlockSession(session_id, opened)

    def release(self, session: BlockSession) -> None:
        """Give the session's slots back."""
        self.slab.release(session.segment)
        session.segment = None

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job[BlockSession]], make_room: MakeRoom) -> list[Outcome]:
        """See `Algorithm.run`."""
        outcomes: dict[int, Outcome] = {}
        for place, job in enumerate(jobs):
            if not self._place(job, make_room):
                outcomes[place] = _refused("the cache has no room for this session")
        self._absorb(jobs, outcomes)
        drafts: list[BlockDraft] = []
        for place, job in enumerate(jobs):
            if place in outcomes:
                continue
            if job.plan.kind is PlanKind.NONE:
                outcomes[place] = Outcome()
            elif job.session.num_missing > MAX_MISSING:
                outcomes[place] = Outcome(DraftStatus.NOT_READY)
            else:
                drafts.append(BlockDraft(place, job.session, job.plan))
        if drafts:
            chosen = choose(self.net, drafts, self._fill(drafts))
            outcomes |= {d.place: o for d, o in zip(drafts, chosen, strict=True)}
        return [outcomes[place] for place in range(len(jobs))]

    def _place(self, job: Job[BlockSession], make_room: MakeRoom) -> bool:
        """Give the session slots for its context rows and a block behind them."""
        session = job.session
        block = 0 if job.plan.kind is PlanKind.NONE else self.net.config.block_size
        needed = max(session.anchor + block, 1)
        while True:
            found = self.slab.reserve(session.segment, session.computed_len, needed)
            if found is not None:
                session.segment = found
                return True
            if not make_room():
                return False

    def _absorb(self, jobs: Sequence[Job[BlockSession]], outcomes: dict[int, Outcome]) -> None:
        """Keys and values of all usable rows; sessions whose rows are not finite are refused."""
        while True:
            taken = [
                (place, job.session, job.session.computed_len)
                for place, job in enumerate(jobs)
                if place not in outcomes and job.session.computed_len < job.session.num_usable_rows
            ]
            if not taken:
                return
            pieces = [session.take_rows(ROWS_PER_FORWARD) for _, session, _ in taken]
            fused_NC = self._fused([session for _, session, _ in taken], pieces)
            finite_N = torch.isfinite(fused_NC).all(-1)
            positions = [
                p for _, session, first in taken for p in range(first, session.computed_len)
            ]
            layers = self._packed.context(fused_NC, torch.tensor(positions, device=self._device))
            row = 0
            for place, session, first in taken:
                rows = slice(row, row + session.computed_len - first)
                row = rows.stop
                if not bool(finite_N[rows].all()):
                    outcomes[place] = _refused("feature rows must be finite")
                    continue
                assert session.segment is not None  # every session here was placed
                for layer, (k_NKD, v_NKD) in enumerate(layers):
                    self.slab.write(session.segment.start + first, k_NKD[rows], v_NKD[rows], layer)

    def _fused(
        self, sessions: Sequence[BlockSession], pieces: Sequence[list[FeatureRows]]
    ) -> Tensor:
        """Context rows [N, C] in session order; equally shaped runs are decoded together."""
        parts: list[Tensor] = []
        order = zip(sessions, pieces, strict=True)
        for (form, _), run in groupby(order, key=lambda pair: (pair[0].form, pair[0].dtype)):
            rows = decode_rows([piece for _, own in run for piece in own])
            rows = rows.to(self._device, self.net.dtype)
            parts.append(self.net.fuse(rows) if form is FeatureForm.RAW else rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fill(self, drafts: Sequence[BlockDraft]) -> Tensor:
        """Hidden states [N, C] of the drafts' blocks, one pass for all."""
        config = self.net.config
        shares: list[BlockShare] = []
        ids: list[int] = []
        positions: list[int] = []
        for draft in drafts:
            session = draft.session
            assert session.segment is not None  # placed before
            shares.append(BlockShare(session.segment.start, session.computed_len, session.anchor))
            ids.extend([session.tokens[-1], *[config.mask_id] * (config.block_size - 1)])
            positions.extend(range(session.anchor, session.anchor + config.block_size))
        attend = attend_blocks(self.slab, shares, config.masks, config.block_size)
        ids_N = torch.tensor(ids, device=self._device)
        positions_N = torch.tensor(positions, device=self._device)
        return self._packed.run(ids_N, positions_N, attend, config.block_size)


def _refused(detail: str) -> Outcome:
    return Outcome(DraftStatus.REFUSED, detail=detail)

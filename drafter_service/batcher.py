"""Drafting for all waiting sessions together: one forward per depth.

    forward 0     rows to absorb, of all sessions          -> y of each session's newest row
    (catch up)    rows still under way: fed with y instead  (at most MAX_MISSING, else not ready)
    forward 1..   the frontiers of all sessions' drafts, one level each, until no draft grows

A head that fills masked rows (P-EAGLE) needs the first only: see `masked_drafting`.

Linear layers see one flat batch of rows; attention sees each session alone. KV of committed rows
comes from true features only; what a draft writes behind it is overwritten by the next round.
Knows nothing of the prefix rule, of files, or of what the head computes. `draft_alone` is the
reference: the same rounds, one session at a time.

    row t = (feature of token t, token t + 1), position t; its logits are for token t + 2

Shapes: N flat rows, C hidden size of the head, W draft vocabulary, B drafting sessions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter_service.absorbing import Absorber
from drafter_service.attention import Part
from drafter_service.cache import KvSlab
from drafter_service.feature_head import FeatureHead, HeadSession, Mask
from drafter_service.growing import grower_for, num_expanded
from drafter_service.head_draft import HeadDraft, finish, num_missing, refused
from drafter_service.head_runner import HeadRunner
from drafter_service.masked_drafting import MaskedDrafting
from drafter_service.ranking import NodeRows, rank_children
from drafter_service.service import Job, MakeRoom, Outcome
from protos.exchange import DraftStatus, Plan, PlanKind

MAX_MISSING = 8
"""Trailing rows that a draft does without: more than one round rarely leaves under way."""


class Batcher:
    """Absorbs and drafts over one head and one slab. windows: see `attend_over`."""

    def __init__(
        self,
        head: FeatureHead,
        slab: KvSlab,
        target_ids_W: Tensor,
        dtype: torch.dtype,
        windows: Sequence[int | None] = (None,),
        mask: Mask | None = None,
    ) -> None:
        self._head = head
        self._slab = slab
        self._target_ids_W = target_ids_W
        self._runner = HeadRunner(head, slab, target_ids_W.device, dtype, windows)
        self._absorber = Absorber(self._runner, mask)
        self._masked: MaskedDrafting | None = None
        if mask is not None:
            self._masked = MaskedDrafting(self._runner, mask, target_ids_W)

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job[HeadSession]], make_room: MakeRoom) -> list[Outcome]:
        """See `Algorithm.run`."""
        outcomes: dict[int, Outcome] = {}
        for place, job in enumerate(jobs):
            if not self._place(job, make_room):
                outcomes[place] = refused("the cache has no room for this session")
        filled = self._absorber.absorb(jobs, outcomes)
        drafts: list[HeadDraft] = []
        for place, job in enumerate(jobs):
            session = job.session
            if place in outcomes:
                continue
            if job.plan.kind is PlanKind.NONE:
                outcomes[place] = Outcome()
            elif session.newest_y_C is None or num_missing(session) > MAX_MISSING:
                outcomes[place] = Outcome(DraftStatus.NOT_READY)
            else:
                assert session.segment is not None  # placed above
                start = session.segment.start
                drafts.append(HeadDraft(place, session, start, grower_for(job.plan)))
        if drafts and self._masked is not None:
            self._masked.draft(drafts, filled, outcomes)
        elif drafts:
            self._draft(drafts, outcomes)
        return [outcomes[place] for place in range(len(jobs))]

    def _place(self, job: Job[HeadSession], make_room: MakeRoom) -> bool:
        """Give the session slots for what this round writes."""
        session = job.session
        needed = max(session.base_len - 1, 0) + num_draft_rows(job.plan)
        while True:
            found = self._slab.reserve(session.segment, session.computed_len, max(needed, 1))
            if found is not None:
                session.segment = found
                return True
            if not make_room():
                return False

    def _draft(self, drafts: Sequence[HeadDraft], outcomes: dict[int, Outcome]) -> None:
        y_NC = self._catch_up(drafts)
        growing = list(drafts)
        counts = [1] * len(growing)
        while growing:
            self._rank(growing, counts, y_NC, outcomes)
            growing = [d for d in growing if d.place not in outcomes and not d.grower.is_done]
            if growing:
                y_NC = self._expand(growing, y_NC)
                counts = [len(draft.grower.frontier_tokens) for draft in growing]
        finish(drafts, outcomes)

    def _catch_up(self, drafts: Sequence[HeadDraft]) -> Tensor:
        """y [B, C] of row base_len - 2 of every session, self-fed where rows are missing."""
        newest = [draft.session.newest_y_C for draft in drafts]
        y_BC = torch.stack([y for y in newest if y is not None])
        ahead = 0
        while True:
            late = [b for b, draft in enumerate(drafts) if draft.num_missing > ahead]
            if not late:
                return y_BC
            rows = [drafts[b].session.computed_len + ahead for b in late]
            ids = [drafts[b].session.tokens[row + 1] for b, row in zip(late, rows, strict=True)]
            parts = [drafts[b].part(row, 1) for b, row in zip(late, rows, strict=True)]
            y_BC[late] = self._runner.step(ids, self._head.feedback(y_BC[late]), rows, parts)
            ahead += 1

    def _rank(
        self,
        drafts: Sequence[HeadDraft],
        counts: Sequence[int],
        y_NC: Tensor,
        outcomes: dict[int, Outcome],
    ) -> None:
        """Grow every draft by the ranked children of its rows."""
        groups = [
            NodeRows(count, draft.session.params, draft.base_len + draft.grower.level)
            for draft, count in zip(drafts, counts, strict=True)
        ]
        most = max(draft.grower.num_children for draft in drafts)
        ranked = rank_children(self._head.logits(y_NC), groups, self._target_ids_W, most)
        first = 0
        for draft, count in zip(drafts, counts, strict=True):
            rows = slice(first, first + count)
            draft.first = first
            first = rows.stop
            if ranked.finite[rows].all():
                draft.grower.grow(ranked.ids[rows], ranked.scores[rows])
                draft.q.extend(q for q in ranked.q[rows] if q is not None)
            else:
                outcomes[draft.place] = refused("the head's logits are not finite")

    def _expand(self, drafts: Sequence[HeadDraft], y_NC: Tensor) -> Tensor:
        """One level: y of all frontier nodes, fed with their parents' y."""
        ids: list[int] = []
        positions: list[int] = []
        sources: list[int] = []
        parts: list[Part] = []
        for draft in drafts:
            grower = draft.grower
            count = len(grower.frontier_tokens)
            cached_len = draft.base_len - 1 + grower.mask.shape[1] - count
            ids.extend(grower.frontier_tokens.tolist())
            positions.extend([draft.base_len - 2 + grower.level] * count)
            sources.extend((grower.frontier_parents + draft.first).tolist())
            tail = None if grower.mask.all() else torch.from_numpy(grower.mask)
            parts.append(draft.part(cached_len, count, tail))
        g_NC = self._head.feedback(y_NC[sources])
        return self._runner.step(ids, g_NC, positions, parts)


def draft_alone(
    batcher: Batcher, jobs: Sequence[Job[HeadSession]], make_room: MakeRoom
) -> list[Outcome]:
    """The reference for `Batcher.run`: a plain loop over sessions."""
    return [outcome for job in jobs for outcome in batcher.run([job], make_room)]


def num_draft_rows(plan: Plan) -> int:
    """Rows a draft writes behind the committed ones at most, masked or expanded."""
    return 0 if plan.kind is PlanKind.NONE else num_expanded(plan)

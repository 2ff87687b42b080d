"""Drafting for all waiting sessions together: one forward per depth.

    forward 0     rows to absorb, of all sessions          -> y of each session's newest row
    (catch up)    rows still under way: fed with y instead  (at most MAX_MISSING, else not ready)
    forward 1..   the frontiers of all sessions' drafts, one level each, until no draft grows

Linear layers see one flat batch of rows; attention sees each session alone. KV of committed rows
comes from true features only; what a draft writes behind it is overwritten by the next round.
Knows nothing of the prefix rule, of files, or of what the head computes. `draft_alone` is the
reference: the same rounds, one session at a time.

    row t = (feature of token t, token t + 1), position t; its logits are for token t + 2

Shapes: N flat rows, C hidden size of the head, W draft vocabulary, B drafting sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from drafter_service.attention import Attend, Part, attend_over, causal_tail
from drafter_service.cache import KvSlab, Segment
from drafter_service.ranking import NodeRows, rank_children
from drafter_service.rows import decode_rows
from drafter_service.service import Job, MakeRoom, Outcome
from drafter_service.session import Session
from drafter_service.tree_builder import TreeGrower
from protos.exchange import DraftStatus, Plan, PlanKind, SessionOpen
from protos.features import FeatureForm, FeatureRows

MAX_MISSING = 8
"""Trailing rows that a draft does without: more than one round rarely leaves under way."""

ROWS_PER_FORWARD = 256
"""Rows of one session absorbed in one forward."""


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


@dataclass(slots=True)
class _Draft:
    """One session's draft under way. `place`: of its job; `first`: of its rows in the newest y."""

    place: int
    session: HeadSession
    start: int
    grower: TreeGrower
    first: int = 0

    @property
    def base_len(self) -> int:
        return self.session.base_len


class Batcher:
    """Absorbs and drafts over one head and one slab."""

    def __init__(
        self, head: FeatureHead, slab: KvSlab, target_ids_W: Tensor, dtype: torch.dtype
    ) -> None:
        self._head = head
        self._slab = slab
        self._target_ids_W = target_ids_W
        self._device = target_ids_W.device
        self._dtype = dtype

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job[HeadSession]], make_room: MakeRoom) -> list[Outcome]:
        """See `Algorithm.run`."""
        outcomes: dict[int, Outcome] = {}
        for place, job in enumerate(jobs):
            if not self._place(job, make_room):
                outcomes[place] = _refused("the cache has no room for this session")
        self._absorb(jobs, outcomes)
        drafts: list[_Draft] = []
        for place, job in enumerate(jobs):
            session = job.session
            if place in outcomes:
                continue
            if job.plan.kind is PlanKind.NONE:
                outcomes[place] = Outcome()
            elif session.newest_y_C is None or _num_missing(session) > MAX_MISSING:
                outcomes[place] = Outcome(DraftStatus.NOT_READY)
            else:
                assert session.segment is not None  # placed above
                start = session.segment.start
                drafts.append(_Draft(place, session, start, TreeGrower(job.plan)))
        if drafts:
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

    def _absorb(self, jobs: Sequence[Job[HeadSession]], outcomes: dict[int, Outcome]) -> None:
        """Compute all usable rows of all jobs; refuse sessions whose rows are not finite."""
        waiting = [(place, job.session) for place, job in enumerate(jobs) if place not in outcomes]
        while True:
            taken = [
                (place, session, session.computed_len, session.take_rows(ROWS_PER_FORWARD))
                for place, session in waiting
                if session.computed_len < session.num_usable_rows
            ]
            if not taken:
                return
            g_NC = self._features([(session, pieces) for _, session, _, pieces in taken])
            finite = torch.isfinite(g_NC).all(-1)
            parts: list[Part] = []
            ids: list[int] = []
            positions: list[int] = []
            kept: list[tuple[HeadSession, int]] = []
            keep_N = torch.ones(len(g_NC), dtype=torch.bool, device=g_NC.device)
            first = 0
            all_finite = bool(finite.all())
            for place, session, cached_len, _ in taken:
                count = session.computed_len - cached_len
                rows = slice(first, first + count)
                first = rows.stop
                if not all_finite and not bool(finite[rows].all()):
                    outcomes[place] = _refused("feature rows must be finite")
                    keep_N[rows] = False
                    continue
                assert session.segment is not None  # every session here was placed
                ids.extend(session.tokens[cached_len + 1 : session.computed_len + 1])
                positions.extend(range(cached_len, session.computed_len))
                parts.append(Part(session.segment.start, cached_len, count, causal_tail(count)))
                kept.append((session, len(ids) - 1))
            waiting = [(place, session) for place, session in waiting if place not in outcomes]
            if kept:
                y_NC = self._step(ids, g_NC if all_finite else g_NC[keep_N], positions, parts)
                for session, row in kept:
                    session.newest_y_C = y_NC[row].clone()

    def _features(self, taken: Sequence[tuple[HeadSession, list[FeatureRows]]]) -> Tensor:
        """g [N, C] of rows in session order; runs of equally shaped rows are decoded together."""
        parts: list[Tensor] = []
        for (form, _), run in groupby(taken, key=lambda item: (item[0].form, item[0].dtype)):
            rows = decode_rows([piece for _, pieces in run for piece in pieces])
            rows = rows.to(self._device, self._dtype)
            parts.append(self._head.fuse(rows) if form is FeatureForm.RAW else rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _step(
        self, ids: Sequence[int], g_NC: Tensor, positions: Sequence[int], parts: Sequence[Part]
    ) -> Tensor:
        ids_N = torch.tensor(ids, device=self._device)
        positions_N = torch.tensor(positions, device=self._device)
        return self._head.step(ids_N, g_NC, positions_N, attend_over(self._slab, parts))

    def _draft(self, drafts: Sequence[_Draft], outcomes: dict[int, Outcome]) -> None:
        y_NC = self._catch_up(drafts)
        growing = list(drafts)
        counts = [1] * len(growing)
        while growing:
            self._rank(growing, counts, y_NC, outcomes)
            growing = [d for d in growing if d.place not in outcomes and not d.grower.is_done]
            if growing:
                y_NC = self._expand(growing, y_NC)
                counts = [len(draft.grower.frontier_tokens) for draft in growing]
        for draft in drafts:
            if draft.place not in outcomes:
                tree, ranked_ids = draft.grower.finish()
                outcomes[draft.place] = Outcome(tree=tree, ranked_ids=ranked_ids)

    def _catch_up(self, drafts: Sequence[_Draft]) -> Tensor:
        """y [B, C] of row base_len - 2 of every session, self-fed where rows are missing."""
        newest = [draft.session.newest_y_C for draft in drafts]
        y_BC = torch.stack([y for y in newest if y is not None])
        ahead = 0
        while True:
            late = [b for b, draft in enumerate(drafts) if _num_missing(draft.session) > ahead]
            if not late:
                return y_BC
            rows = [drafts[b].session.computed_len + ahead for b in late]
            ids = [drafts[b].session.tokens[row + 1] for b, row in zip(late, rows, strict=True)]
            parts = [Part(drafts[b].start, row, 1) for b, row in zip(late, rows, strict=True)]
            y_BC[late] = self._step(ids, self._head.feedback(y_BC[late]), rows, parts)
            ahead += 1

    def _rank(
        self,
        drafts: Sequence[_Draft],
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
            else:
                outcomes[draft.place] = _refused("the head's logits are not finite")

    def _expand(self, drafts: Sequence[_Draft], y_NC: Tensor) -> Tensor:
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
            parts.append(Part(draft.start, cached_len, count, tail))
        g_NC = self._head.feedback(y_NC[sources])
        return self._step(ids, g_NC, positions, parts)


def draft_alone(
    batcher: Batcher, jobs: Sequence[Job[HeadSession]], make_room: MakeRoom
) -> list[Outcome]:
    """The reference for `Batcher.run`: a plain loop over sessions."""
    return [outcome for job in jobs for outcome in batcher.run([job], make_room)]


def num_draft_rows(plan: Plan) -> int:
    """Rows a draft writes behind the committed ones: every level but the last is expanded."""
    if plan.kind is PlanKind.NONE:
        return 0
    return (plan.depth - 1) * (plan.width if plan.kind is PlanKind.TREE else 1)


def _num_missing(session: HeadSession) -> int:
    return session.base_len - 1 - session.computed_len


def _refused(detail: str) -> Outcome:
    return Outcome(DraftStatus.REFUSED, detail=detail)

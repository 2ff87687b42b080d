"""Drafting for all waiting sessions together: one forward per depth.

    forward 0     rows to absorb, of all sessions          -> y of each session's newest row
    (catch up)    rows still under way: fed with y instead  (at most MAX_MISSING, else not ready)
    forward 1..   the frontiers of all sessions' drafts, one level each, until no draft grows

A head that fills masked rows (P-EAGLE) needs one forward instead of the last three: masked rows
behind the newest true one, one per further token; every level's children come out of it.

Linear layers see one flat batch of rows; attention sees each session alone. KV of committed rows
comes from true features only; what a draft writes behind it is overwritten by the next round.
Knows nothing of the prefix rule, of files, or of what the head computes. `draft_alone` is the
reference: the same rounds, one session at a time.

    row t = (feature of token t, token t + 1), position t; its logits are for token t + 2

Shapes: N flat rows, C hidden size of the head, W draft vocabulary, B drafting sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from drafter_service.attention import Part, attend_over, causal_tail
from drafter_service.cache import KvSlab
from drafter_service.feature_head import FeatureHead, HeadSession, Mask
from drafter_service.growing import grower_for, num_expanded
from drafter_service.ranking import NodeRows, rank_children
from drafter_service.rows import decode_rows
from drafter_service.service import Job, MakeRoom, Outcome
from drafter_service.tree_builder import Grower
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.features import FeatureForm, FeatureRows
from protos.sparse import SparseQ

MAX_MISSING = 8
"""Trailing rows that a draft does without: more than one round rarely leaves under way."""

ROWS_PER_FORWARD = 256
"""Rows of one session absorbed in one forward."""


@dataclass(slots=True)
class _Taken:
    """Rows [start, computed_len) taken from one session, to be absorbed now."""

    place: int
    session: HeadSession
    start: int
    pieces: list[FeatureRows] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.session.computed_len - self.start


@dataclass(slots=True)
class _Draft:
    """One session's draft under way. `place`: of its job; `first`: of its rows in the newest y."""

    place: int
    session: HeadSession
    start: int
    grower: Grower
    first: int = 0
    q: list[SparseQ] = field(default_factory=list)

    @property
    def base_len(self) -> int:
        return self.session.base_len

    def part(self, cached_len: int, num_rows: int, tail: Tensor | None = None) -> Part:
        """New rows behind the newest true one."""
        return Part(self.start, cached_len, num_rows, tail, self.session.computed_len - 1)


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
        self._device = target_ids_W.device
        self._dtype = dtype
        self._windows = tuple(windows)
        self._mask = mask

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
                drafts.append(_Draft(place, session, start, grower_for(job.plan)))
        if drafts and self._mask is not None:
            self._draft_masked(drafts, self._mask, outcomes)
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

    def _absorb(self, jobs: Sequence[Job[HeadSession]], outcomes: dict[int, Outcome]) -> None:
        """Compute all usable rows of all jobs; refuse sessions whose rows are not finite."""
        while True:
            taken = [
                _Taken(place, job.session, job.session.computed_len)
                for place, job in enumerate(jobs)
                if place not in outcomes and job.session.computed_len < job.session.num_usable_rows
            ]
            if not taken:
                return
            for share in taken:
                share.pieces = share.session.take_rows(ROWS_PER_FORWARD)
            g_NC = self._features(taken)
            finite_N = torch.isfinite(g_NC).all(-1)
            if not bool(finite_N.all()):
                taken, g_NC = _without_broken(taken, g_NC, finite_N, outcomes)
            if taken:
                self._absorb_finite(taken, g_NC)

    def _absorb_finite(self, taken: Sequence["_Taken"], g_NC: Tensor) -> None:
        """One forward over the rows just taken; keeps y of each session's newest row."""
        ids: list[int] = []
        positions: list[int] = []
        parts: list[Part] = []
        for share in taken:
            session, start, end = share.session, share.start, share.session.computed_len
            assert session.segment is not None  # every session here was placed
            ids.extend(session.tokens[start + 1 : end + 1])
            positions.extend(range(start, end))
            tail = causal_tail(end - start)
            parts.append(Part(session.segment.start, start, end - start, tail))
        y_NC = self._step(ids, g_NC, positions, parts)
        last = -1
        for share in taken:
            last += share.count
            share.session.newest_y_C = y_NC[last].clone()

    def _features(self, taken: Sequence["_Taken"]) -> Tensor:
        """g [N, C] of rows in session order; runs of equally shaped rows are decoded together."""
        parts: list[Tensor] = []
        for (form, _), run in groupby(taken, key=lambda t: (t.session.form, t.session.dtype)):
            rows = decode_rows([piece for share in run for piece in share.pieces])
            rows = rows.to(self._device, self._dtype)
            parts.append(self._head.fuse(rows) if form is FeatureForm.RAW else rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _step(
        self, ids: Sequence[int], g_NC: Tensor, positions: Sequence[int], parts: Sequence[Part]
    ) -> Tensor:
        ids_N = torch.tensor(ids, device=self._device)
        positions_N = torch.tensor(positions, device=self._device)
        attend = attend_over(self._slab, parts, self._windows)
        return self._head.step(ids_N, g_NC, positions_N, attend)

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
        _finish(drafts, outcomes)

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
            parts = [drafts[b].part(row, 1) for b, row in zip(late, rows, strict=True)]
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
                draft.q.extend(q for q in ranked.q[rows] if q is not None)
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
            parts.append(draft.part(cached_len, count, tail))
        g_NC = self._head.feedback(y_NC[sources])
        return self._step(ids, g_NC, positions, parts)

    def _draft_masked(
        self, drafts: Sequence[_Draft], mask: Mask, outcomes: dict[int, Outcome]
    ) -> None:
        """All levels out of one pass: a level's children follow any node of the level before."""
        y_NC = self._fill_masked(drafts, mask)
        groups = [
            NodeRows(1, draft.session.params, draft.base_len + level)
            for draft in drafts
            for level in range(draft.grower.depth)
        ]
        most = max(draft.grower.num_children for draft in drafts)
        ranked = rank_children(self._head.logits(y_NC), groups, self._target_ids_W, most)
        first = 0
        for draft in drafts:
            rows = range(first, first + draft.grower.depth)
            first = rows.stop
            if not ranked.finite[rows.start : rows.stop].all():
                outcomes[draft.place] = _refused("the head's logits are not finite")
                continue
            num_nodes = 1
            for row in rows:
                if draft.grower.is_done:
                    break
                ids, scores = ranked.ids[[row] * num_nodes], ranked.scores[[row] * num_nodes]
                draft.grower.grow(ids, scores)
                num_nodes = len(draft.grower.frontier_tokens)
            draft.q.extend(q for q in ranked.q[rows.start : rows.stop] if q is not None)
        _finish(drafts, outcomes)

    def _fill_masked(self, drafts: Sequence[_Draft], mask: Mask) -> Tensor:
        """y of `depth` rows per draft: row base_len - 2 and the masked ones behind it. True rows
        still under way are masked too, but for their tokens, which are known."""
        ids: list[int] = []
        positions: list[int] = []
        parts: list[Part] = []
        for draft in drafts:
            session = draft.session
            known = session.tokens[session.computed_len + 1 :]
            count = len(known) + draft.grower.depth - 1
            if not count:
                continue
            ids.extend(known + [mask.token_id] * (draft.grower.depth - 1))
            positions.extend(range(session.computed_len, session.computed_len + count))
            parts.append(draft.part(session.computed_len, count, causal_tail(count)))
        filled_NC: Tensor | None = None
        if parts:
            filled_NC = self._step(ids, mask.g_C.expand(len(ids), -1), positions, parts)
        wanted: list[Tensor] = []
        first = 0
        for draft in drafts:
            missing, depth = _num_missing(draft.session), draft.grower.depth
            if not missing:
                assert draft.session.newest_y_C is not None  # else it were not drafting
                wanted.append(draft.session.newest_y_C[None])
            if filled_NC is not None:
                last = first + missing + depth - 1
                wanted.append(filled_NC[max(first, last - depth) : last])
                first = last
        return torch.cat(wanted)


def _without_broken(
    taken: Sequence[_Taken], g_NC: Tensor, finite_N: Tensor, outcomes: dict[int, Outcome]
) -> tuple[list[_Taken], Tensor]:
    """The sessions whose rows are all finite, and their rows; the others are refused."""
    kept: list[_Taken] = []
    rows: list[Tensor] = []
    first = 0
    for share in taken:
        own = slice(first, first + share.count)
        first = own.stop
        if bool(finite_N[own].all()):
            kept.append(share)
            rows.append(g_NC[own])
        else:
            outcomes[share.place] = _refused("feature rows must be finite")
    return kept, torch.cat(rows) if rows else g_NC[:0]


def draft_alone(
    batcher: Batcher, jobs: Sequence[Job[HeadSession]], make_room: MakeRoom
) -> list[Outcome]:
    """The reference for `Batcher.run`: a plain loop over sessions."""
    return [outcome for job in jobs for outcome in batcher.run([job], make_room)]


def num_draft_rows(plan: Plan) -> int:
    """Rows a draft writes behind the committed ones at most, masked or expanded."""
    return 0 if plan.kind is PlanKind.NONE else num_expanded(plan)


def _finish(drafts: Sequence[_Draft], outcomes: dict[int, Outcome]) -> None:
    for draft in drafts:
        if draft.place not in outcomes:
            tree, ranked_ids = draft.grower.finish()
            q = tuple(draft.q[: tree.num_nodes])
            outcomes[draft.place] = Outcome(tree=tree, ranked_ids=ranked_ids, q=q)


def _num_missing(session: HeadSession) -> int:
    return session.base_len - 1 - session.computed_len


def _refused(detail: str) -> Outcome:
    return Outcome(DraftStatus.REFUSED, detail=detail)

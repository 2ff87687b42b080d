"""`draft_model` as an algorithm: all waiting sessions in one forward per depth.

    forward 0     tokens whose KV is missing, of all sessions    -> logits after each anchor
    forward 1..   the frontiers of all sessions' drafts, one level each, until no draft grows

Tokens only. A drafted row whose token was committed is kept (`ModelSession.adopt`), so a chain
that was accepted whole costs one row to catch up. A long prompt is computed in shares, so that it
does not hold the others' drafts: until it is through, its session is *not ready*. `reference` says
the same in plain loops.

Shapes: N flat rows, M rows whose logits are wanted, V ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from drafter_service.cache import KvSlab
from drafter_service.draft_model.attention import PackedRows
from drafter_service.draft_model.model import PackedModel
from drafter_service.draft_model.session import DraftedRows, ModelSession
from drafter_service.growing import grower_for, num_expanded
from drafter_service.ranking import NodeRows, Ranked, rank_children
from drafter_service.service import Job, MakeRoom, Outcome
from drafter_service.tree_builder import Grower
from protos.exchange import DraftStatus, Plan, PlanKind, SessionOpen
from protos.sparse import SparseQ

ROWS_PER_FORWARD: Final = 256
"""Tokens of one session computed in one forward."""

ROWS_PER_ROUND: Final = 1024
"""Tokens of one session computed before the others' drafts go out."""


@dataclass(slots=True)
class _Draft:
    """One session's draft under way. first: of its rows in the newest logits."""

    place: int
    session: ModelSession
    start: int
    grower: Grower
    first: int = 0
    newest: list[int] = field(default_factory=list)
    q: list[SparseQ] = field(default_factory=list)

    @property
    def rows(self) -> DraftedRows:
        """The rows it has written."""
        assert self.session.drafted is not None  # set when the draft began
        return self.session.drafted


class DraftModel:
    """Chains and trees of a causal language model."""

    def __init__(self, model: PackedModel, slab: KvSlab, num_layers: int) -> None:
        self.slab = slab
        self._model = model
        self._num_layers = num_layers

    def create(self, session_id: int, opened: SessionOpen) -> ModelSession:
        """An empty session; it gets slots when it first computes."""
        return ModelSession(session_id, opened)

    def release(self, session: ModelSession) -> None:
        """Give the session's slots back."""
        self.slab.release(session.segment)
        session.segment = None

    def run(self, jobs: Sequence[Job[ModelSession]], make_room: MakeRoom) -> list[Outcome]:
        """See `Algorithm.run`."""
        outcomes: dict[int, Outcome] = {}
        for place, job in enumerate(jobs):
            problem = self._prepare(job, make_room)
            if problem:
                outcomes[place] = _refused(problem)
        logits = self._catch_up(jobs, outcomes)
        drafts: list[_Draft] = []
        for place, job in enumerate(jobs):
            if place in outcomes:
                continue
            if job.plan.kind is PlanKind.NONE:
                outcomes[place] = Outcome()
            elif place not in logits:
                outcomes[place] = Outcome(DraftStatus.NOT_READY)
            else:
                drafts.append(_begin(place, job))
        if drafts:
            self._draft(drafts, torch.stack([logits[d.place] for d in drafts]), outcomes)
        return [outcomes[place] for place in range(len(jobs))]

    def _prepare(self, job: Job[ModelSession], make_room: MakeRoom) -> str:
        """Give the session slots for what this round writes; why that cannot be."""
        session = job.session
        session.adopt(self.slab, self._num_layers)
        most = max(session.tokens[session.cached_len :], default=0)
        if most >= self._model.num_embedded:
            return f"token {most} is padding here: the model knows {self._model.num_embedded}"
        needed = session.base_len + _num_draft_rows(job.plan)
        while True:
            found = self.slab.reserve(session.segment, session.cached_len, needed)
            if found is not None:
                session.segment = found
                return ""
            if not make_room():
                return "the cache has no room for this session"

    def _catch_up(
        self, jobs: Sequence[Job[ModelSession]], outcomes: dict[int, Outcome]
    ) -> dict[int, Tensor]:
        """Compute missing tokens of all jobs; logits [V] after the anchor, by place of the job."""
        logits: dict[int, Tensor] = {}
        left = dict.fromkeys((p for p in range(len(jobs)) if p not in outcomes), ROWS_PER_ROUND)
        for place in left:
            session = jobs[place].session
            if jobs[place].plan.kind is not PlanKind.NONE:
                # The anchor's logits are needed, so its row is computed, again if need be.
                session.cached_len = min(session.cached_len, session.base_len - 1)
        while True:
            shares: list[tuple[int, int]] = []
            for place, most in left.items():
                session = jobs[place].session
                count = min(session.base_len - session.cached_len, ROWS_PER_FORWARD, most)
                if count > 0:
                    shares.append((place, count))
                    left[place] -= count
            if not shares:
                return logits
            self._compute(jobs, shares, logits)

    def _compute(
        self,
        jobs: Sequence[Job[ModelSession]],
        shares: Sequence[tuple[int, int]],
        logits: dict[int, Tensor],
    ) -> None:
        """One forward over `count` tokens of each session named."""
        ids: list[int] = []
        parts: list[PackedRows] = []
        last_rows: dict[int, int] = {}
        for place, count in shares:
            session = jobs[place].session
            assert session.segment is not None  # every session here has slots
            start, end = session.cached_len, session.cached_len + count
            ids.extend(session.tokens[start:end])
            tail = torch.ones(count, count, dtype=torch.bool).tril() if count > 1 else None
            positions = tuple(range(start, end))
            parts.append(PackedRows(session.segment.start, start, end, positions, tail))
            session.cached_len = end
            if end == session.base_len and jobs[place].plan.kind is not PlanKind.NONE:
                last_rows[place] = len(ids) - 1
        # Without any row asked for, the last one's logits are computed for nothing.
        logits_MV = self._model.step(ids, parts, list(last_rows.values()) or [len(ids) - 1])
        for row, place in enumerate(last_rows):
            logits[place] = logits_MV[row]

    def _draft(
        self, drafts: Sequence[_Draft], logits_MV: Tensor, outcomes: dict[int, Outcome]
    ) -> None:
        growing, counts = list(drafts), [1] * len(drafts)
        while growing:
            ranked = self._rank(growing, counts, logits_MV)
            _grow(growing, counts, ranked, outcomes)
            growing = [d for d in growing if d.place not in outcomes and not d.grower.is_done]
            if growing:
                counts = [len(draft.grower.frontier_tokens) for draft in growing]
                logits_MV = self._expand(growing)
        for draft in drafts:
            if draft.place not in outcomes:
                tree, ranked_ids = draft.grower.finish()
                outcomes[draft.place] = Outcome(
                    tree=tree, ranked_ids=ranked_ids, q=tuple(draft.q[: tree.num_nodes])
                )

    def _rank(self, drafts: Sequence[_Draft], counts: Sequence[int], logits_MV: Tensor) -> Ranked:
        groups = [
            NodeRows(count, draft.session.params, draft.session.base_len + draft.grower.level)
            for draft, count in zip(drafts, counts, strict=True)
        ]
        most = max(draft.grower.num_children for draft in drafts)
        return rank_children(logits_MV, groups, self._model.ids_V, most)

    def _expand(self, drafts: Sequence[_Draft]) -> Tensor:
        """One level: logits [M, V] after all frontier nodes."""
        ids: list[int] = []
        parts: list[PackedRows] = []
        for draft in drafts:
            grower, base_len, rows = draft.grower, draft.session.base_len, draft.rows
            frontier: list[int] = grower.frontier_tokens.tolist()
            cached_len = base_len + len(rows.tokens)
            first = len(rows.tokens)
            before = draft.newest or [-1]
            rows.parents.extend(before[row] for row in grower.frontier_parents.tolist())
            rows.tokens.extend(frontier)
            draft.newest = list(range(first, len(rows.tokens)))
            ids.extend(frontier)
            positions = (base_len + grower.level - 1,) * len(frontier)
            tail = None if grower.mask.all() else torch.from_numpy(grower.mask)
            parts.append(PackedRows(draft.start, cached_len, base_len, positions, tail))
        return self._model.step(ids, parts, range(len(ids)))


def _begin(place: int, job: Job[ModelSession]) -> _Draft:
    session = job.session
    assert session.segment is not None  # every session that computed has slots
    session.drafted = DraftedRows(session.base_len)
    return _Draft(place, session, session.segment.start, grower_for(job.plan))


def _grow(
    drafts: Sequence[_Draft], counts: Sequence[int], ranked: Ranked, outcomes: dict[int, Outcome]
) -> None:
    """Grow every draft by the ranked children of its rows."""
    first = 0
    for draft, count in zip(drafts, counts, strict=True):
        rows = slice(first, first + count)
        first = rows.stop
        if not ranked.finite[rows].all():
            outcomes[draft.place] = _refused("the model's logits are not finite")
            continue
        draft.grower.grow(ranked.ids[rows], ranked.scores[rows])
        draft.q.extend(q for q in ranked.q[rows] if q is not None)


def _num_draft_rows(plan: Plan) -> int:
    return 0 if plan.kind is PlanKind.NONE else num_expanded(plan)


def _refused(detail: str) -> Outcome:
    return Outcome(DraftStatus.REFUSED, detail=detail)

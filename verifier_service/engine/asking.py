"""The advisers' part of a step: whom to ask for drafts, and which nodes to verify.

Turns running requests into views, lets the planner decide, and hands back one merged, admitted
tree per decoding request. Whatever advisers answer is checked here: a request that wants no drafts
is asked for none, nothing is drafted past the last token that may be committed, and the errors
they may raise (`OutriderError`) cost drafts, never a step.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import OutriderError
from protos.exchange import Plan
from protos.generation import SpeculationMode
from protos.tree import CandidateTree
from verifier_service.engine.batch import MergedDraft, is_draft_usable, merge_drafts
from verifier_service.engine.ports import (
    Draft,
    DraftAsk,
    Drafting,
    Planner,
    SequenceView,
    SourcePlan,
)
from verifier_service.engine.rejection import (
    chain_plans,
    chain_to_test,
    honest_chain,
    wait_s,
)
from verifier_service.engine.request import RunningRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answers:
    """Usable drafts by request key, how long the step was held, what was lost on the way.

    asks: what was asked, of whom.
    """

    drafts: dict[int, list[Draft]]
    wait_s: float = 0.0
    num_dropped: int = 0
    has_failed: bool = False
    asks: Sequence[DraftAsk] = ()


def view_of(request: RunningRequest) -> SequenceView:
    """What advisers may know of a request."""
    return SequenceView(
        key=request.key,
        request_id=request.request.request_id,
        tokens=request.tokens,
        num_rows=request.computed_len,
        params=request.request.params,
        speculation=request.request.speculation,
        remaining=request.remaining,
        decoding=request.is_decoding,
    )


class Asking:
    """Asks planner and draft exchange in turn; used by the engine's thread."""

    def __init__(
        self, drafting: Drafting, planner: Planner, vocab_size: int, max_wait_s: float
    ) -> None:
        self._drafting = drafting
        self._planner = planner
        self._vocab_size = vocab_size
        self._max_wait_s = max_wait_s

    def ask(self, requests: Sequence[RunningRequest]) -> Answers:
        """One exchange for all running requests; those still in their prompt only absorb."""
        views = [view_of(request) for request in requests]
        plans, deadline_s = self._plans(views)
        asks = [
            DraftAsk(view, _sent(view, plans[view.key]))
            for view in views
            if view.speculation.mode is not SpeculationMode.OFF
        ]
        if not asks:
            return Answers({})
        began = time.perf_counter()
        try:
            answered = self._drafting.exchange(asks, min(deadline_s, self._max_wait_s))
        except OutriderError as error:
            _log.warning("draft exchange failed, stepping without drafts: %s", error)
            return Answers({}, time.perf_counter() - began, has_failed=True, asks=asks)
        return self._checked(asks, answered, time.perf_counter() - began)

    def admit(
        self, decoding: Sequence[RunningRequest], answers: Answers, room: int
    ) -> dict[int, MergedDraft]:
        """Merged and admitted trees by request key, at most `room` draft nodes together."""
        if not answers.drafts:
            return {}
        admitted: dict[int, MergedDraft] = {}
        walking: list[RunningRequest] = []
        for request in decoding:
            if not request.request.params.uses_rejection:
                walking.append(request)
                continue
            most = min(room, request.remaining - 1)
            chain = chain_to_test(answers.drafts.get(request.key, ()), most)
            room -= chain.tree.num_nodes
            admitted[request.key] = chain
        # Below the last token that may be committed nothing can be accepted.
        merged = [
            fitting(r, merge_drafts(answers.drafts.get(r.key, ()), r.remaining - 1))
            for r in walking
        ]
        trees = self._planner.admit(
            [view_of(request) for request in walking],
            [draft.tree for draft in merged],
            room,
            [draft.sources for draft in merged],
        )
        for request, draft, given in zip(walking, merged, trees, strict=True):
            tree = given.best(room)
            room -= tree.num_nodes
            admitted[request.key] = draft.cut_to(tree)
        return admitted

    def _plans(
        self, views: Sequence[SequenceView]
    ) -> tuple[dict[int, tuple[SourcePlan, ...]], float]:
        """By request key, and how long the step may wait."""
        sources = self._drafting.sources()
        walking = [view for view in views if not view.params.uses_rejection]
        testing = [view for view in views if view.params.uses_rejection]
        planned, deadline_s = self._planner.plan(walking, sources)
        chains = [chain_plans(view, sources) for view in testing]
        plans = {view.key: plan for view, plan in zip(walking, planned, strict=True)}
        plans |= {view.key: plan for view, plan in zip(testing, chains, strict=True)}
        asked = [plan for view, plan in zip(testing, chains, strict=True) if view.decoding]
        return plans, max(deadline_s, wait_s(asked, sources))

    def _checked(
        self, asks: Sequence[DraftAsk], answered: dict[int, list[Draft]], wait_s: float
    ) -> Answers:
        views = {ask.view.key: ask.view for ask in asks}
        usable: dict[int, list[Draft]] = {}
        num_dropped = 0
        for key, drafts in answered.items():
            view = views.get(key)
            for draft in drafts:
                good = self._usable(draft, view) if view and view.decoding else None
                num_dropped += good is not draft
                if good is not None:
                    usable.setdefault(key, []).append(good)
        return Answers(usable, wait_s, num_dropped, asks=asks)

    def _usable(self, draft: Draft, view: SequenceView) -> Draft | None:
        if not is_draft_usable(draft, view.base_len, self._vocab_size):
            return None
        if view.params.uses_rejection:
            return honest_chain(view, draft, self._vocab_size)
        return draft


def fitting(request: RunningRequest, draft: MergedDraft) -> MergedDraft:
    """The draft without nodes that the request's grammar forbids: the target cannot choose them.

    Never asked for a chain that is tested against its q: what a chain holds must not cut it.
    """
    if request.grammar is None or not draft.tree.num_nodes:
        return draft
    nodes = request.grammar.fitting(draft.tree)
    return draft if len(nodes) == draft.tree.num_nodes else draft.cut_to(draft.tree.keep(nodes))


def _sent(view: SequenceView, plans: tuple[SourcePlan, ...]) -> tuple[SourcePlan, ...]:
    """Plans as they are sent: a request still in its prompt only feeds the sources named."""
    if view.remaining < 2:
        return ()
    return plans if view.decoding else tuple(SourcePlan(p.source, Plan()) for p in plans)


def fair_cut(trees: Sequence[CandidateTree], room: int) -> list[CandidateTree]:
    """Every tree whole while they fit, else equal shares of `room`, best nodes first."""
    order = sorted(range(len(trees)), key=lambda i: trees[i].num_nodes)
    cut: dict[int, CandidateTree] = {}
    for rank, index in enumerate(order):
        cut[index] = trees[index].best(room // (len(order) - rank))
        room -= cut[index].num_nodes
    return [cut[index] for index in range(len(trees))]

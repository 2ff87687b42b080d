"""The advisers' part of a step: whom to ask for drafts, and which nodes to verify.

Turns running requests into views, honours the per-request override (off, fixed), lets the planner
decide the rest, and hands back one merged, admitted tree per decoding request. Knows no tokens'
truth: whatever advisers answer is checked here, and their permitted errors (`OutriderError`) cost
drafts, never a step.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protos.errors import OutriderError
from protos.exchange import Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from protos.tree import CandidateTree
from verifier_service.engine.batch import MergedDraft, is_draft_usable, merge_drafts
from verifier_service.engine.ports import (
    Draft,
    DraftAsk,
    Drafting,
    Planner,
    SequenceView,
    SourceInfo,
    SourcePlan,
)
from verifier_service.engine.request import RunningRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answers:
    """Usable drafts by request key, how long the step was held, what was lost on the way."""

    drafts: dict[int, list[Draft]]
    wait_s: float = 0.0
    num_dropped: int = 0
    has_failed: bool = False


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
        views = [view_of(r) for r in requests if _mode(r.request.speculation) is not _OFF]
        if not views:
            return Answers({})
        sources = self._drafting.sources()
        plans, deadline_s = self._plans(views, sources)
        asks = [DraftAsk(view, plans.get(view.key, ())) for view in views]
        began = time.perf_counter()
        try:
            answered = self._drafting.exchange(asks, min(deadline_s, self._max_wait_s))
        except OutriderError as error:
            _log.warning("draft exchange failed, stepping without drafts: %s", error)
            return Answers({}, time.perf_counter() - began, has_failed=True)
        wait_s = time.perf_counter() - began
        base_lens = {view.key: view.base_len for view in views if view.decoding}
        usable: dict[int, list[Draft]] = {}
        num_dropped = 0
        for key, drafts in answered.items():
            base_len = base_lens.get(key, -1)
            good = [d for d in drafts if is_draft_usable(d, base_len, self._vocab_size)]
            num_dropped += len(drafts) - len(good)
            if good:
                usable[key] = good
        return Answers(usable, wait_s, num_dropped)

    def admit(
        self, requests: Sequence[RunningRequest], answers: Answers, room: int
    ) -> dict[int, MergedDraft]:
        """Merged and admitted trees by request key, at most `room` draft nodes together."""
        fixed: list[tuple[RunningRequest, MergedDraft]] = []
        free: list[tuple[RunningRequest, MergedDraft]] = []
        for request in requests:
            # Below the last token that may be committed nothing can be accepted.
            merged = merge_drafts(answers.drafts.get(request.key, ()), request.remaining - 1)
            if merged.tree.num_nodes:
                is_fixed = _mode(request.request.speculation) is SpeculationMode.FIXED
                (fixed if is_fixed else free).append((request, merged))
        admitted: dict[int, MergedDraft] = {}
        for index, (request, merged) in enumerate(fixed):
            share = min(_node_cap(request.request.speculation), room // (len(fixed) - index))
            tree = merged.tree.best(share)
            room -= tree.num_nodes
            admitted[request.key] = merged.cut_to(tree)
        if free:
            trees = self._planner.admit(
                [view_of(request) for request, _ in free],
                [merged.tree for _, merged in free],
                room,
                [merged.sources for _, merged in free],
            )
            for (request, merged), given in zip(free, trees, strict=True):
                tree = given.best(room)
                room -= tree.num_nodes
                admitted[request.key] = merged.cut_to(tree)
        return admitted

    def _plans(
        self, views: Sequence[SequenceView], sources: Sequence[SourceInfo]
    ) -> tuple[dict[int, tuple[SourcePlan, ...]], float]:
        decoding = [view for view in views if view.decoding and view.remaining > 1]
        fixed = [v for v in decoding if _mode(v.speculation) is SpeculationMode.FIXED]
        free = [v for v in decoding if _mode(v.speculation) is SpeculationMode.AUTO]
        plans = {view.key: fixed_plans(view.speculation, sources) for view in fixed}
        deadline_s = self._max_wait_s if any(plans.values()) else 0.0
        if free:
            planned, planned_s = self._planner.plan(free, sources)
            plans |= {view.key: plan for view, plan in zip(free, planned, strict=True)}
            deadline_s = max(deadline_s, planned_s)
        return plans, deadline_s


_OFF = SpeculationMode.OFF


def _mode(speculation: Speculation) -> SpeculationMode:
    return speculation.mode


def fixed_plans(speculation: Speculation, sources: Sequence[SourceInfo]) -> tuple[SourcePlan, ...]:
    """The override's plan for its drafters (all when none is named), clamped to what each can do.

    A source that makes no trees is asked for a chain of the same depth.
    """
    plan = speculation.plan
    if plan is None or plan.kind is PlanKind.NONE:
        return ()
    named = [s for s in sources if not speculation.drafters or s.name in speculation.drafters]
    return tuple(
        SourcePlan(source.name, fitted) for source in named if (fitted := _fit(plan, source))
    )


def _fit(plan: Plan, source: SourceInfo) -> Plan | None:
    limits = source.capabilities
    if plan.kind not in limits.plan_kinds:
        if PlanKind.CHAIN not in limits.plan_kinds:
            return None
        plan = Plan(PlanKind.CHAIN, depth=plan.depth)
    return replace(
        plan,
        depth=min(plan.depth, limits.max_depth or plan.depth),
        width=min(plan.width, limits.max_width or plan.width),
        nodes=min(plan.nodes, limits.max_nodes or plan.nodes),
    )


def _node_cap(speculation: Speculation) -> int:
    """Draft nodes that a fixed plan allows a merged tree: its own number where it names one."""
    plan = speculation.plan
    return plan.nodes if plan is not None and plan.nodes > 0 else 1 << 30


def fair_cut(trees: Sequence[CandidateTree], room: int) -> list[CandidateTree]:
    """Every tree whole while they fit, else equal shares of `room`, best nodes first."""
    order = sorted(range(len(trees)), key=lambda i: trees[i].num_nodes)
    cut: dict[int, CandidateTree] = {}
    for rank, index in enumerate(order):
        cut[index] = trees[index].best(room // (len(order) - rank))
        room -= cut[index].num_nodes
    return [cut[index] for index in range(len(trees))]

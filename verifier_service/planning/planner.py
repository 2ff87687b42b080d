"""The planner: what to draft and what to verify, every step, from evidence and measured costs.

An adviser: whatever it decides changes the speed and never the text. It keeps no tokens. One
step goes through it in this order; each call may be missing (no drafts, no step) without harm.

    plan    settle the last step's account, choose sources and shapes, add probes, set the wait
    admit   cut what came to the nodes that pay
    observe_round / observe_step    learn ranks, scores, delays, costs

Bound: over any run, steps take at most (1 + extra_share) of the plain steps for the same tokens,
plus a grant of a few steps, up to the error of the cost model (reference/disagg.md 2.4). A
source is never switched off for good: it is probed, seldom and cheaply.
"""

from collections.abc import Sequence

from protos.exchange import Plan, PlanKind
from protos.generation import SpeculationMode
from protos.tree import CandidateTree
from verifier_service.engine.ports import RoundOutcome, SequenceView, SourceInfo, SourcePlan
from verifier_service.planning.acceptance import RankEvidence
from verifier_service.planning.asking import (
    allowed,
    chain_plan,
    fixed_plans,
    lookup_plans,
    tree_plan,
)
from verifier_service.planning.bank import CreditBank
from verifier_service.planning.calibration import Calibration, Names
from verifier_service.planning.choice import Choice, choose
from verifier_service.planning.costs import VerifyCosts
from verifier_service.planning.feeding import Feeding, needs_feeding
from verifier_service.planning.gate import Gate, GateStep
from verifier_service.planning.learning import Learning
from verifier_service.planning.ledger import Ledger, PlannerCounts
from verifier_service.planning.options import Delays, Label, Market, Offer, offers, split
from verifier_service.planning.probing import Probing
from verifier_service.planning.prospects import Prospects
from verifier_service.planning.settings import PlannerSettings
from verifier_service.planning.sources import reply_deadline_s

Plans = list[tuple[SourcePlan, ...]]
_LOCAL_DEADLINE_S = 0.005
_RICH_STEPS = 8.0


class AdaptivePlanner:
    """Implements `verifier_service.engine.ports.Planner`. Used by the engine's thread only."""

    def __init__(self, verify: VerifyCosts, settings: PlannerSettings | None = None) -> None:
        self._settings = settings or PlannerSettings()
        self._verify = verify
        self._delays = Delays()
        self._evidence = RankEvidence()
        self._calibration = Calibration()
        self._prospects = Prospects(self._evidence, self._settings.max_nodes)
        self._probing = Probing()
        self._feeding = Feeding()
        self._bank = CreditBank(
            self._settings.extra_share, self._settings.grant_steps, self._settings.loan_steps
        )
        self._ledger = Ledger(verify, self._bank)
        self.reason = self._ledger.reason  # why the newest step drafted as it did, for traces
        self._learning = Learning(
            self._evidence, self._calibration, self._prospects, self._delays, self._probing
        )
        self._gate = Gate(verify, self._bank, self._calibration, self._settings)
        self._step = 0
        self._label: Label = ()
        self._in_use: frozenset[str] = frozenset()
        self._occasion: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
        self._poor: set[int] = set()

    def plan(
        self, views: Sequence[SequenceView], sources: Sequence[SourceInfo]
    ) -> tuple[Plans, float]:
        """Plans per view, and how long the step may wait for them (seconds)."""
        self._step += 1
        pays = self._ledger.open_step(views)
        self._learning.open_step()
        self._feeding.open_step(self._step)
        plans: dict[int, tuple[SourcePlan, ...]] = {}
        deadline_s, sunk_s = 0.0, 0.0
        for view in views:
            if view.speculation.mode is SpeculationMode.FIXED:
                plans[view.key] = fixed_plans(view.speculation, sources, view.remaining)
                if view.decoding:
                    deadline_s = max(deadline_s, self._fixed_deadline_s(plans[view.key], sources))
            elif view.speculation.mode is SpeculationMode.AUTO and not view.decoding:
                plans[view.key] = self._fed_in_prompt(view, sources)
        if deadline_s:
            named = {p.source for asked in plans.values() for p in asked}
            sunk_s = self._delays.wait_s([i for i in sources if i.name in named], 6)
        free_views = [v for v in views if _may_speculate(v)]
        if free_views and sources and pays and not self._is_plain_step():
            wait_s = self._plan_free(views, free_views, sources, sunk_s, plans)
            deadline_s = max(deadline_s, wait_s)
        asked = [plans.get(view.key, ()) for view in views]
        self._ledger.note_asked(bool(deadline_s))
        self._learning.note_asked({v.key: p for v, p in zip(views, asked, strict=True)}, sources)
        return asked, deadline_s

    def admit(
        self,
        views: Sequence[SequenceView],
        trees: Sequence[CandidateTree],
        room: int,
        sources: Sequence[tuple[Names, ...]] = (),
    ) -> list[CandidateTree]:
        """Cut merged trees to what pays, at most `room` draft nodes in all."""
        base_rows, context = self._ledger.base_rows(views), sum(v.base_len for v in views)
        step = GateStep(
            self._step, base_rows, context, self._learning.expected_wait_s, frozenset(self._poor)
        )
        cut = self._gate.admit(views, trees, room, sources, step)
        self._ledger.note_admitted(sum(tree.num_nodes for tree in cut), self._gate.again_s)
        return cut

    def observe_round(self, outcome: RoundOutcome) -> None:
        """Learn from one request's round."""
        self._ledger.note_round(outcome)
        self._learning.observe(outcome)

    def observe_step(
        self,
        num_rows: int,
        num_branching: int,
        context: int,
        verify_s: float,
        wait_s: float,
        other_s: float = 0.0,
    ) -> None:
        """Learn a step's cost. context: sum of positions read by all spans."""
        self._ledger.note_step(num_rows, num_branching, context, verify_s, wait_s, other_s)
        self._learning.observe_wait(wait_s)

    def forget(self, key: int) -> None:
        """The request left."""
        parts = self._evidence, self._calibration, self._prospects, self._learning, self._feeding
        for part in parts:
            part.forget(key)
        self._ledger.forget(key)

    @property
    def counts(self) -> PlannerCounts:
        """Counts and sums since the start, for metrics and the router."""
        return self._ledger.counts

    def _is_plain_step(self) -> bool:
        every = self._settings.plain_every
        return every > 0 and self._step % every == 0

    def _fixed_deadline_s(
        self, plans: Sequence[SourcePlan], sources: Sequence[SourceInfo]
    ) -> float:
        named = {plan.source for plan in plans}
        waits = [3.0 * i.reply_p95_s for i in sources if i.name in named and not i.local]
        return max([self._settings.fixed_deadline_s, *waits]) if plans else 0.0

    def _plan_free(
        self,
        views: Sequence[SequenceView],
        free_views: Sequence[SequenceView],
        sources: Sequence[SourceInfo],
        sunk_s: float,
        plans: dict[int, tuple[SourcePlan, ...]],
    ) -> float:
        """Plan the requests whose speculation is ours to decide; returns the wait to allow."""
        market = self._market(views, sources, sunk_s)
        plain_s = market.plain_s
        self._poor = {
            v.key
            for v in free_views
            if self._bank.request_may_spend_s(v.key, plain_s)
            <= self._settings.extra_share * plain_s
        }
        able = [v for v in free_views if v.key not in self._poor] or list(free_views)
        made, choice = self._choose(able, market)
        offer = made[choice.index] if choice else None
        for view in free_views:
            plans[view.key] = lookup_plans(view, market.free, self._settings.max_nodes)
        if offer and choice:
            for place, view in enumerate(able):
                plans[view.key] += self._waited_plans(view, offer, place, choice.num_nodes[place])
        asked = {
            p.source for v in free_views for p in plans[v.key] if p.plan.kind is not PlanKind.NONE
        }
        wait_s = self._allowed_wait_s(market, offer, choice, asked)
        wait_s = max(wait_s, self._probe(able, market, asked, plans))
        if asked and not wait_s:
            wait_s = _LOCAL_DEADLINE_S
        return wait_s

    def _market(
        self, views: Sequence[SequenceView], sources: Sequence[SourceInfo], sunk_s: float
    ) -> Market:
        base_rows, context = self._ledger.base_rows(views), sum(v.base_len for v in views)
        plain_s = self._verify.seconds(base_rows, 0, context, 0)
        free, priced = split(sources, self._delays, plain_s)
        spend_s = self._bank.may_spend_s(plain_s)
        return Market(free, priced, base_rows, context, plain_s, spend_s, sunk_s)

    def _choose(
        self, views: Sequence[SequenceView], market: Market
    ) -> tuple[list[Offer], Choice | None]:
        """The choice among all options every few steps; between them the last one's shape.

        Node counts and affordability are decided every step, unless nothing is waited for: then
        there is nothing to decide before drafts are there.
        """
        is_due = self._step % (self._settings.choose_every + len(views)) == 0
        if self._label and not self._in_use and not (is_due and market.priced):
            self._ledger.note_label(self._label)
            return [], None
        parts = (self._prospects, self._delays, self._verify, self._settings)
        names = tuple(i.name for i in (*market.free, *market.priced))
        occasion = (names, tuple(v.key for v in views))
        only = self._label if self._label and occasion == self._occasion else None
        if is_due:
            only = None
        self._occasion = occasion
        made = offers(views, market, *parts, only)
        choices = choose([offer.option for offer in made])
        if only is not None and not choices:
            made = offers(views, market, *parts)
            choices = choose([offer.option for offer in made])
        return made, self._steady(views, made, choices)

    def _steady(
        self, views: Sequence[SequenceView], made: Sequence[Offer], choices: Sequence[Choice]
    ) -> Choice | None:
        """The best choice, or the last one while nothing promises clearly more.

        Sources that hold nothing yet must promise more still: to be fed is not free.
        """
        if not choices:
            return None

        def worth(choice: Choice) -> float:
            waited = made[choice.index].waited
            is_cold = any(not self._feeding.holds(v, i) for i in waited for v in views)
            return choice.rate / (1.0 + self._settings.feeding_margin * is_cold)

        best = max(choices, key=worth)
        current = next((c for c in choices if made[c.index].option.label == self._label), None)
        if current is not None and best.rate < (1.0 + self._settings.hysteresis) * current.rate:
            best = current
        self._label = made[best.index].option.label
        self._in_use = frozenset(info.name for info in made[best.index].waited)
        self._ledger.note_label(self._label if sum(best.num_nodes) else ("none",), best.expected)
        return best

    def _waited_plans(
        self, view: SequenceView, offer: Offer, place: int, count: int
    ) -> tuple[SourcePlan, ...]:
        """What the chosen first `count` nodes of a profile mean as plans for the waited sources.

        A source that does not hold the request yet, or is wanted for none of its nodes, is fed.
        """
        profile = offer.option.profiles[place]
        made = []
        for index, info in enumerate(allowed(view.speculation, offer.infos)):
            if info not in offer.waited:
                continue
            nodes, depth = profile.share(count, index)
            plan = Plan()
            if nodes and self._feeding.holds(view, info):
                plan = (
                    tree_plan(info, depth, 2 * nodes, view.remaining)
                    if offer.branching
                    else chain_plan(info, depth, view.remaining)
                )
            fed = self._feeding.feed(view, info)
            made.append(fed if plan.kind is PlanKind.NONE else SourcePlan(info.name, plan))
        return tuple(made)

    def _fed_in_prompt(
        self, view: SequenceView, sources: Sequence[SourceInfo]
    ) -> tuple[SourcePlan, ...]:
        """Sources in use absorb a prompt while it is computed; look-ups always do."""
        return tuple(
            self._feeding.feed(view, info)
            for info in allowed(view.speculation, sources)
            if info.name in self._in_use or not needs_feeding(info)
        )

    def _allowed_wait_s(
        self, market: Market, offer: Offer | None, choice: Choice | None, asked: set[str]
    ) -> float:
        """p95 of the replies, never above the gain they promise nor what the bank can pay."""
        if offer is None or choice is None:
            return 0.0
        waited = [i for i in offer.waited if i.name in asked and not i.local]
        if not waited:
            return 0.0
        verify_s = float(offer.option.cost_s[sum(choice.num_nodes)])
        worth_s = choice.expected / len(choice.num_nodes) * market.plain_s - verify_s
        payable_s = market.plain_s + offer.option.may_spend_s - verify_s
        return max(min(max(map(reply_deadline_s, waited)), worth_s, payable_s), 0.0)

    def _probe(
        self,
        views: Sequence[SequenceView],
        market: Market,
        asked: set[str],
        plans: dict[int, tuple[SourcePlan, ...]],
    ) -> float:
        """Ask one source that is left out for a short chain, if the bank can pay the wait."""
        wait_s = 0.0
        is_rich = self._bank.balance_s > _RICH_STEPS * market.plain_s
        for info in market.priced:
            if info.name in asked:
                self._note_probed(info.name, by_choice=True)
                continue
            depth = self._settings.probe_depth
            cost_s = self._delays.wait_s([info], depth)
            payable_s = market.may_spend_s - self._settings.extra_share * market.plain_s
            is_due = self._probing.is_due(info.name, self._step, is_rich)
            if wait_s or not is_due or cost_s > payable_s:
                continue
            able = [v for v in views if info in allowed(v.speculation, market.priced)]
            view = self._feeding.subject(info, able)
            plan = chain_plan(info, depth, view.remaining) if view is not None else Plan()
            if view is None or plan.kind is PlanKind.NONE:
                continue
            is_held = self._feeding.holds(view, info)
            fed = self._feeding.feed(view, info)
            plans[view.key] += (SourcePlan(info.name, plan) if is_held else fed,)
            if not is_held:
                continue
            self._note_probed(info.name, by_choice=False)
            self._ledger.counts.num_probes += 1
            wait_s = min(reply_deadline_s(info), payable_s)
        return wait_s

    def _note_probed(self, name: str, by_choice: bool) -> None:
        elapsed = self._probing.asked(name, self._step, by_choice)
        if elapsed > 1:
            self._evidence.fade(name, self._settings.fade_per_step**elapsed)


def _may_speculate(view: SequenceView) -> bool:
    auto = view.speculation.mode is SpeculationMode.AUTO
    return auto and view.decoding and view.remaining > 1

"""What a round teaches: ranks, scores, delays and answers go to the parts that keep them.

Holds only what was asked in this step, per request. Knows no costs of verification.
"""

from collections.abc import Mapping, Sequence

from protos.exchange import Plan, PlanKind
from protos.tree import merge
from verifier_service.engine.ports import Draft, RoundOutcome, SourceInfo, SourcePlan
from verifier_service.planning.acceptance import RankEvidence, Ranks, ranks_of
from verifier_service.planning.calibration import Calibration
from verifier_service.planning.options import Delays, by_name
from verifier_service.planning.probing import Probing
from verifier_service.planning.prospects import Prospects


class Learning:
    """Distributes outcomes; remembers what the current step asked for."""

    def __init__(
        self,
        evidence: RankEvidence,
        calibration: Calibration,
        prospects: Prospects,
        delays: Delays,
        probing: Probing,
    ) -> None:
        self._evidence = evidence
        self._calibration = calibration
        self._prospects = prospects
        self._delays = delays
        self._probing = probing
        self._asked: dict[int, dict[str, Plan]] = {}
        self._sources: Mapping[str, SourceInfo] = {}
        self._unscaled_s = 0.0

    @property
    def expected_wait_s(self) -> float:
        """Wait that this step's asks are expected to expose."""
        return self._delays.exposed.factor * self._unscaled_s

    def open_step(self) -> None:
        """A new step begins; nothing is asked yet."""
        self._asked = {}
        self._unscaled_s = 0.0

    def note_asked(
        self, asked: Mapping[int, Sequence[SourcePlan]], sources: Sequence[SourceInfo]
    ) -> None:
        """What this step asks of whom."""
        self._sources = by_name(sources)
        self._asked = {
            key: {p.source: p.plan for p in plans if p.plan.kind is not PlanKind.NONE}
            for key, plans in asked.items()
        }
        depths: dict[str, int] = {}
        for plans in self._asked.values():
            for name, plan in plans.items():
                depths[name] = max(depths.get(name, 0), plan.depth)
        infos = [info for info in sources if info.name in depths]
        self._unscaled_s = self._delays.unscaled_s(infos, max(depths.values(), default=0))

    def observe_wait(self, wait_s: float) -> None:
        """How long this step was really held."""
        if self._unscaled_s:
            self._delays.exposed.observe(self._unscaled_s, wait_s)

    def observe(self, outcome: RoundOutcome) -> None:
        """One request's round."""
        asked = self._asked.pop(outcome.key, {})
        in_time = {d.source: d for d in outcome.drafts if not d.was_late}
        for name, plan in asked.items():
            draft = in_time.get(name)
            info = self._sources.get(name)
            local = info is not None and info.local
            if not local:
                self._delays.of(name).observe_answer(draft is not None)
            if draft is not None:
                self._delays.of(name).observe_reply(plan.depth, draft.latency_s)
            if draft is not None or local:
                ranks = _ranks(draft, outcome.choices)
                depth = draft.tree.depth if draft is not None else 0
                self._evidence.observe(outcome.key, name, ranks, max(depth, 1))
            self._probing.observe(name, _num_right(draft, outcome.choices))
        proposed = [(draft.source, draft.tree) for draft in outcome.drafts]
        self._calibration.observe_drafts(outcome.key, proposed, outcome.choices)
        self._prospects.count_round(outcome.key)

    def forget(self, key: int) -> None:
        """The request left."""
        self._asked.pop(key, None)


def _ranks(draft: Draft | None, choices: Sequence[int]) -> Ranks:
    """Ranks of a draft; a look-up that found nothing missed at depth 1."""
    if draft is None:
        return ranks_of(merge([])[0], (), choices)
    return ranks_of(draft.tree, draft.ranked_ids, choices)


def _num_right(draft: Draft | None, choices: Sequence[int]) -> int:
    if draft is None:
        return 0
    table, node, right = draft.tree.children(), 0, 0
    for choice in choices:
        following = table[node].get(choice)
        if following is None:
            break
        node, right = following, right + 1
    return right

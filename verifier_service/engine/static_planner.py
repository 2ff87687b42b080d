"""A planner that always asks for the same drafts and verifies all that fit.

For tests, benchmarks and a verifier run on its own; it learns nothing.
"""

from collections.abc import Sequence

from protos.tree import CandidateTree
from verifier_service.engine.asking import fair_cut
from verifier_service.engine.ports import RoundOutcome, SequenceView, SourceInfo, SourcePlan


class StaticPlanner:
    """Asks every available source named in `plans`, for every request and round."""

    def __init__(self, plans: Sequence[SourcePlan] = (), deadline_s: float = 0.25) -> None:
        self._plans = tuple(plans)
        self._deadline_s = deadline_s

    def plan(
        self, views: Sequence[SequenceView], sources: Sequence[SourceInfo]
    ) -> tuple[list[tuple[SourcePlan, ...]], float]:
        """The same plans for every view, less those whose source cannot be asked now."""
        names = {source.name for source in sources}
        plans = tuple(plan for plan in self._plans if plan.source in names)
        return [plans for _ in views], self._deadline_s if plans else 0.0

    def admit(
        self,
        views: Sequence[SequenceView],
        trees: Sequence[CandidateTree],
        room: int,
        sources: Sequence[tuple[tuple[str, ...], ...]] = (),
    ) -> list[CandidateTree]:
        """All nodes while they fit, else equal shares."""
        return fair_cut(trees, room)

    def observe_round(self, outcome: RoundOutcome) -> None:
        """Nothing is learnt."""

    def observe_step(
        self, num_rows: int, num_branching: int, context: int, verify_s: float, wait_s: float
    ) -> None:
        """Nothing is learnt."""

    def forget(self, key: int) -> None:
        """Nothing is kept."""

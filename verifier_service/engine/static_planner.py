"""A planner that always asks for the same drafts and verifies all that fit.

For tests, benchmarks and a verifier run on its own; it learns nothing. The per-request override
(off, fixed) is honoured like everywhere else.
"""

from collections.abc import Sequence

from protos.generation import SpeculationMode
from protos.tree import CandidateTree
from verifier_service.engine.asking import fair_cut
from verifier_service.engine.ports import RoundOutcome, SequenceView, SourceInfo, SourcePlan
from verifier_service.planning.asking import fixed_node_budget, fixed_plans


class StaticPlanner:
    """Asks every available source named in `plans`, for every request and round."""

    def __init__(self, plans: Sequence[SourcePlan] = (), deadline_s: float = 0.25) -> None:
        self._plans = tuple(plans)
        self._deadline_s = deadline_s

    def plan(
        self, views: Sequence[SequenceView], sources: Sequence[SourceInfo]
    ) -> tuple[list[tuple[SourcePlan, ...]], float]:
        """The same plans for every view, less those whose source cannot be asked now."""
        planned = [self._plan_one(view, sources) for view in views]
        asked = any(plans and view.decoding for view, plans in zip(views, planned, strict=True))
        return planned, self._deadline_s if asked else 0.0

    def admit(
        self,
        views: Sequence[SequenceView],
        trees: Sequence[CandidateTree],
        room: int,
        sources: Sequence[tuple[tuple[str, ...], ...]] = (),
    ) -> list[CandidateTree]:
        """All nodes while they fit (a fixed plan's own bound first), else equal shares."""
        bounded = [
            tree if (most := _most_nodes(view)) is None else tree.best(most)
            for view, tree in zip(views, trees, strict=True)
        ]
        return fair_cut(bounded, room)

    def observe_round(self, outcome: RoundOutcome) -> None:
        """Nothing is learnt."""

    def observe_step(
        self,
        num_rows: int,
        num_branching: int,
        context: int,
        verify_s: float,
        wait_s: float,
        other_s: float = 0.0,
    ) -> None:
        """Nothing is learnt."""

    def forget(self, key: int) -> None:
        """Nothing is kept."""

    def _plan_one(
        self, view: SequenceView, sources: Sequence[SourceInfo]
    ) -> tuple[SourcePlan, ...]:
        mode = view.speculation.mode
        if mode is SpeculationMode.OFF:
            return ()
        if mode is SpeculationMode.FIXED:
            return fixed_plans(view.speculation, sources, view.remaining)
        names = {source.name for source in sources}
        return tuple(plan for plan in self._plans if plan.source in names)


def _most_nodes(view: SequenceView) -> int | None:
    if view.speculation.mode is not SpeculationMode.FIXED:
        return None
    return fixed_node_budget(view.speculation)

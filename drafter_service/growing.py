"""Which grower drafts a plan, and how many rows that takes at most."""

from drafter_service.static_tree import STATIC_DEPTH, StaticGrower, num_static_rows
from drafter_service.tree_builder import Grower, TreeGrower
from protos.exchange import Plan, PlanKind


def grower_for(plan: Plan) -> Grower:
    """An empty draft in the plan's shape."""
    return StaticGrower(plan) if plan.kind is PlanKind.STATIC else TreeGrower(plan)


def num_expanded(plan: Plan) -> int:
    """Rows written behind the committed ones: every level but the last is expanded, or filled by
    one masked row."""
    levels = plan.depth - 1
    if plan.kind is PlanKind.TREE:
        return levels * plan.width
    return max(levels, num_static_rows(plan.depth)) if plan.kind is PlanKind.STATIC else levels


def num_levels(plan: Plan) -> int:
    """Levels that this plan grows at most; 0 where nothing is drafted."""
    if plan.kind is PlanKind.NONE:
        return 0
    return min(plan.depth, STATIC_DEPTH) if plan.kind is PlanKind.STATIC else plan.depth

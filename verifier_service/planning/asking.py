"""Plans as values: what is asked of one source, for fixed requests, probes and chosen profiles.

Pure. Clamps to what a source offers, because a plan beyond its limits would be refused.
"""

from collections.abc import Sequence
from typing import Final

from protos.exchange import Plan, PlanKind
from protos.generation import Speculation
from protos.plans import fit_plan, node_budget
from verifier_service.engine.ports import SequenceView, SourceInfo, SourcePlan
from verifier_service.planning.prospects import (
    depth_limit,
    drafts_blocks,
    is_chain_only,
    width_limit,
)

DEFAULT_TREE: Final = Plan(PlanKind.TREE, depth=6, width=10, nodes=31)


def allowed(speculation: Speculation, infos: Sequence[SourceInfo]) -> list[SourceInfo]:
    """The sources a request may be drafted by: the named ones, or all."""
    if not speculation.drafters:
        return list(infos)
    return [info for info in infos if info.name in speculation.drafters]


def fixed_plans(
    speculation: Speculation, infos: Sequence[SourceInfo], remaining: int
) -> tuple[SourcePlan, ...]:
    """The given plan (or a tree of 32 rows) for every named source, clamped to each."""
    wanted = speculation.plan or DEFAULT_TREE
    plans = []
    for info in allowed(speculation, infos):
        plan = clamp(wanted, info, remaining)
        if plan.kind is not PlanKind.NONE:
            plans.append(SourcePlan(info.name, plan))
    return tuple(plans)


def fixed_node_budget(speculation: Speculation) -> int | None:
    """Nodes a fixed request's merged tree may have; None: everything that was drafted."""
    return node_budget(speculation.plan or DEFAULT_TREE)


def clamp(plan: Plan, info: SourceInfo, remaining: int) -> Plan:
    """The nearest plan that this source offers: `protos.plans.fit_plan`."""
    return fit_plan(plan, info.capabilities, remaining, info.local)


def chain_plan(info: SourceInfo, depth: int, remaining: int) -> Plan:
    """A chain of at most `depth` tokens from this source, its whole block where it drafts those."""
    depth = depth_limit(info) if drafts_blocks(info) else depth
    return clamp(Plan(PlanKind.CHAIN, depth=depth), info, remaining)


def tree_plan(info: SourceInfo, depth: int, nodes: int, remaining: int) -> Plan:
    """A tree of about `nodes` nodes; a chain where the source drafts nothing else."""
    if is_chain_only(info):
        return chain_plan(info, depth, remaining)
    depth = depth_limit(info) if drafts_blocks(info) else depth
    plan = Plan(PlanKind.TREE, depth=depth, width=width_limit(info), nodes=max(nodes, depth))
    return clamp(plan, info, remaining)


def lookup_plans(
    view: SequenceView, free: Sequence[SourceInfo], max_nodes: int
) -> tuple[SourcePlan, ...]:
    """All that look-ups offer: they cost next to nothing, and admission decides about nodes."""
    made = []
    for info in allowed(view.speculation, free):
        plan = tree_plan(info, depth_limit(info), max_nodes, view.remaining)
        if plan.kind is not PlanKind.NONE:
            made.append(SourcePlan(info.name, plan))
    return tuple(made)

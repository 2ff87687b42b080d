"""Plans as values: what is asked of one source, for fixed requests, probes and chosen profiles.

Pure. Clamps to what a source offers, because a plan beyond its limits would be refused.
"""

from collections.abc import Sequence
from typing import Final

from protos.exchange import Plan, PlanKind
from protos.generation import Speculation
from verifier_service.engine.ports import SequenceView, SourceInfo, SourcePlan
from verifier_service.planning.prospects import (
    depth_limit,
    drafts_blocks,
    is_chain_only,
    node_limit,
    width_limit,
)

DEFAULT_TREE: Final = Plan(PlanKind.TREE, depth=6, width=10, nodes=31)
_LOOKUP_DEPTH: Final = 8


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
    plan = speculation.plan or DEFAULT_TREE
    is_tree = plan.kind is PlanKind.TREE or plan.kind is PlanKind.BLOCK
    return plan.nodes if is_tree and plan.nodes else None


def clamp(plan: Plan, info: SourceInfo, remaining: int) -> Plan:
    """The nearest plan that this source offers, no deeper than tokens remain to be drafted.

    A source of chains answers a tree plan with its chain: look-ups in this process cost nothing,
    so theirs may be longer than the tree is deep.
    """
    kinds = info.capabilities.plan_kinds
    deepest = min(depth_limit(info), remaining - 1)
    if plan.kind is PlanKind.NONE or deepest < 1:
        return Plan()
    if plan.kind in kinds:
        return Plan(
            plan.kind,
            depth=min(plan.depth, deepest),
            width=min(plan.width, info.capabilities.max_width or plan.width),
            nodes=node_limit(info, plan.nodes),
        )
    if plan.kind is PlanKind.STATIC:
        return clamp(Plan(PlanKind.TREE, plan.depth, 4, plan.nodes), info, remaining)
    if plan.kind is PlanKind.BLOCK:
        # Drafted level by level where no pass fills a whole block.
        kind = PlanKind.TREE if plan.nodes else PlanKind.CHAIN
        return clamp(Plan(kind, plan.depth, width_limit(info), plan.nodes), info, remaining)
    if plan.kind is PlanKind.TREE and PlanKind.CHAIN in kinds:
        depth = max(plan.depth, _LOOKUP_DEPTH) if info.local else plan.depth
        return Plan(PlanKind.CHAIN, depth=min(depth, deepest, plan.nodes or depth))
    if plan.kind is PlanKind.CHAIN and PlanKind.TREE in kinds:
        depth = min(plan.depth, deepest)
        return Plan(PlanKind.TREE, depth=depth, width=1, nodes=depth)
    return Plan()


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

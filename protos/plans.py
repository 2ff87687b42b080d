"""Plans made to fit: what of a wished shape a drafter offers, and what may answer it.

Both sides count on the same arithmetic: a verifier clamps plans before it sends them, and whoever
replays recorded texts without a verifier asks for exactly what a live one would have asked for.
Pure; knows no source, session or algorithm.
"""

from dataclasses import replace
from typing import Final

from protos.errors import ProtocolError
from protos.exchange import Capabilities, Plan, PlanKind
from protos.tree import CandidateTree

MAX_DEPTH: Final = 16
"""Deepest draft that is asked of a drafter which names no limit."""

_WIDEST: Final = 8
_LOOKUP_DEPTH: Final = 8


def depth_limit(offered: Capabilities) -> int:
    """Deepest draft that this drafter offers."""
    return offered.max_depth or MAX_DEPTH


def width_limit(offered: Capabilities) -> int:
    """Widest expansion that is asked of this drafter unless a plan names one."""
    return min(offered.max_width or _WIDEST, _WIDEST)


def node_limit(offered: Capabilities, wanted: int) -> int:
    """`wanted` nodes, or as many as this drafter offers."""
    return min(wanted, offered.max_nodes or wanted)


def node_budget(plan: Plan) -> int | None:
    """Nodes that a merged tree may have under a fixed plan; None: everything that was drafted."""
    is_tree = plan.kind is PlanKind.TREE or plan.kind is PlanKind.BLOCK
    return plan.nodes if is_tree and plan.nodes else None


def fit_plan(plan: Plan, offered: Capabilities, remaining: int, is_local: bool) -> Plan:
    """The nearest plan that this drafter offers, no deeper than tokens remain to be drafted.

    remaining: tokens that may still be committed. A source of chains answers a tree plan with its
    chain: look-ups in this process (is_local) cost nothing, so theirs may be longer than the tree
    is deep.
    """
    kinds = offered.plan_kinds
    deepest = min(depth_limit(offered), remaining - 1)
    if plan.kind is PlanKind.NONE or deepest < 1:
        return Plan()
    if plan.kind in kinds:
        return Plan(
            plan.kind,
            depth=min(plan.depth, deepest),
            width=min(plan.width, offered.max_width or plan.width),
            nodes=node_limit(offered, plan.nodes),
        )
    if plan.kind is PlanKind.STATIC:
        return fit_plan(
            Plan(PlanKind.TREE, plan.depth, 4, plan.nodes), offered, remaining, is_local
        )
    if plan.kind is PlanKind.BLOCK:
        # Drafted level by level where no pass fills a whole block.
        kind = PlanKind.TREE if plan.nodes else PlanKind.CHAIN
        wanted = Plan(kind, plan.depth, width_limit(offered), plan.nodes)
        return fit_plan(wanted, offered, remaining, is_local)
    if plan.kind is PlanKind.TREE and PlanKind.CHAIN in kinds:
        depth = max(plan.depth, _LOOKUP_DEPTH) if is_local else plan.depth
        return Plan(PlanKind.CHAIN, depth=min(depth, deepest, plan.nodes or depth))
    if plan.kind is PlanKind.CHAIN and PlanKind.TREE in kinds:
        depth = min(plan.depth, deepest)
        return Plan(PlanKind.TREE, depth=depth, width=1, nodes=depth)
    return Plan()


def clip_plan(plan: Plan, offered: Capabilities, base_len: int) -> Plan:
    """The plan inside one replica's limits and context; none when it does not know the kind."""
    if plan.kind not in offered.plan_kinds:
        return Plan()
    room = offered.max_context - base_len if offered.max_context else plan.depth
    depth = min(plan.depth, offered.max_depth or plan.depth, room)
    if depth < 1:
        return Plan()
    return replace(
        plan,
        depth=depth,
        width=min(plan.width, offered.max_width or plan.width),
        nodes=min(plan.nodes, offered.max_nodes or plan.nodes),
    )


def nodes_asked(plan: Plan) -> int:
    """Most draft nodes that may answer this plan."""
    if plan.kind is PlanKind.NONE:
        return 0
    if plan.kind is PlanKind.CHAIN:
        return plan.depth
    return plan.nodes or plan.depth


def check_answer(tree: CandidateTree, plan: Plan) -> None:
    """Raise ProtocolError unless a draft is no larger than its plan."""
    if tree.num_nodes > nodes_asked(plan) or tree.depth > plan.depth:
        raise ProtocolError(
            f"asked for {nodes_asked(plan)} nodes of depth {plan.depth}, "
            f"not {tree.num_nodes} of depth {tree.depth}"
        )
    if plan.kind is PlanKind.CHAIN and not tree.is_chain:
        raise ProtocolError("asked for a chain, not a tree")

"""Plans made to fit a drafter, and drafts held against their plans."""

import pytest

from protos.errors import ProtocolError
from protos.exchange import Capabilities, Plan, PlanKind
from protos.plans import check_answer, clip_plan, fit_plan, node_budget
from protos.tree import CandidateTree, chain

TREE = Plan(PlanKind.TREE, depth=6, width=10, nodes=31)


def offered(*kinds, **limits):
    given = {"max_depth": 7, "max_width": 4, "max_nodes": 20} | limits
    return Capabilities("kind", "name", 1, kinds, **given)


def test_a_plan_keeps_its_kind_and_shrinks_to_what_is_offered():
    record = offered(PlanKind.TREE)
    assert fit_plan(TREE, record, 40, is_local=True) == Plan(PlanKind.TREE, 6, 4, 20)
    assert fit_plan(TREE, record, 4, is_local=True).depth == 3
    assert fit_plan(TREE, record, 1, is_local=True) == Plan()


@pytest.mark.parametrize(("is_local", "depth"), [(True, 7), (False, 6)])
def test_look_ups_in_this_process_may_be_longer_than_the_tree_is_deep(is_local, depth):
    assert fit_plan(TREE, offered(PlanKind.CHAIN), 40, is_local) == Plan(PlanKind.CHAIN, depth)


def test_a_block_becomes_a_chain_or_tree_where_nobody_fills_blocks():
    record = offered(PlanKind.CHAIN, PlanKind.TREE)
    assert fit_plan(Plan(PlanKind.BLOCK, 9), record, 40, True).kind is PlanKind.CHAIN
    assert fit_plan(Plan(PlanKind.BLOCK, 9, 1, 30), record, 40, True) == Plan(
        PlanKind.TREE, 7, 4, 20
    )
    assert fit_plan(Plan(PlanKind.BLOCK, 9), offered(), 40, True) == Plan()


def test_a_plan_ends_where_the_drafters_context_ends():
    record = offered(PlanKind.CHAIN, max_context=100)
    wished = Plan(PlanKind.CHAIN, 5)
    assert clip_plan(wished, record, 90) == wished
    assert clip_plan(wished, record, 97).depth == 3
    assert clip_plan(wished, record, 100) == Plan()
    assert clip_plan(Plan(PlanKind.TREE, 5, 2, 9), record, 1) == Plan()


@pytest.mark.parametrize(
    ("plan", "nodes"),
    [(TREE, 31), (Plan(PlanKind.BLOCK, 7), None), (Plan(PlanKind.CHAIN, 4), None)],
)
def test_only_trees_bound_what_is_merged(plan, nodes):
    assert node_budget(plan) == nodes


def test_a_draft_larger_than_its_plan_is_refused():
    fork = CandidateTree((1, 2), (0, 0), (0.0, 0.0))
    check_answer(chain([1, 2]), Plan(PlanKind.CHAIN, 2))
    check_answer(fork, Plan(PlanKind.TREE, 1, 2, 2))
    for tree, plan in [
        (chain([1, 2, 3]), Plan(PlanKind.CHAIN, 2)),
        (fork, Plan(PlanKind.CHAIN, 2)),
        (fork, Plan(PlanKind.TREE, 1, 2, 1)),
        (chain([1]), Plan()),
    ]:
        with pytest.raises(ProtocolError):
            check_answer(tree, plan)

"""Block drafters in the planner: one pass for any depth; confidences cut the verified prefix."""

import numpy as np
import pytest

from protos.exchange import Capabilities, Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from protos.tree import chain
from verifier_service.engine.ports import SourceInfo
from verifier_service.planning.admission import StepCosts, admit_nodes
from verifier_service.planning.asking import (
    chain_plan,
    clamp,
    fixed_node_budget,
    fixed_plans,
    tree_plan,
)
from verifier_service.planning.calibration import Calibration
from verifier_service.planning.readings import WeighedTree
from verifier_service.planning.sources import SourceCosts

BLOCKS = (PlanKind.CHAIN, PlanKind.TREE, PlanKind.BLOCK)


def info(*kinds, depth=7, nodes=60):
    record = Capabilities("dflash", "d", 1, kinds, max_depth=depth, max_width=10, max_nodes=nodes)
    return SourceInfo("d", record, local=False)


def fixed(plan):
    return Speculation(mode=SpeculationMode.FIXED, drafters=("d",), plan=plan)


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (7, 7), (8, 7), (64, 7)])
def test_a_block_longer_than_trained_is_clamped_to_the_trained_one(asked, given):
    (plan,) = fixed_plans(fixed(Plan(PlanKind.BLOCK, asked)), [info(*BLOCKS)], remaining=40)
    assert plan.plan == Plan(PlanKind.BLOCK, given)


def test_nothing_is_drafted_past_the_last_token():
    assert clamp(Plan(PlanKind.BLOCK, 7), info(*BLOCKS), remaining=4).depth == 3
    assert clamp(Plan(PlanKind.BLOCK, 7), info(*BLOCKS), remaining=1).kind is PlanKind.NONE


def test_a_source_without_blocks_answers_with_its_nearest_shape():
    wanted = Plan(PlanKind.BLOCK, 5)
    assert clamp(wanted, info(PlanKind.CHAIN), 40) == Plan(PlanKind.CHAIN, 5, 8, 0)
    tree = clamp(Plan(PlanKind.BLOCK, 5, 1, 20), info(PlanKind.CHAIN, PlanKind.TREE), 40)
    assert (tree.kind, tree.depth, tree.nodes) == (PlanKind.TREE, 5, 20)


def test_a_trees_budget_bounds_what_is_verified():
    assert fixed_node_budget(fixed(Plan(PlanKind.BLOCK, 7, 1, 16))) == 16
    assert fixed_node_budget(fixed(Plan(PlanKind.BLOCK, 7))) is None


def test_the_planner_always_asks_for_the_whole_block():
    assert chain_plan(info(*BLOCKS), 2, 40).depth == 7
    assert tree_plan(info(*BLOCKS), 2, 12, 40).depth == 7
    assert chain_plan(info(PlanKind.CHAIN), 2, 40).depth == 2


def test_a_deeper_block_is_not_believed_to_take_longer():
    costs = SourceCosts()
    for _ in range(20):
        costs.observe_reply(3, 0.012)
    assert costs.latency_s(7, info(*BLOCKS)) == pytest.approx(0.012)
    assert costs.latency_s(7, info(PlanKind.CHAIN)) > 0.015


def admitted(confidences):
    """Nodes kept of a block of seven whose steps all had log-probability -0.1."""
    draft = chain(range(7), [-0.1 * depth for depth in range(1, 8)]).believing(confidences)
    survivals = Calibration().survivals(1, draft, ())
    cost_s = 0.030 + 0.0004 * np.arange(8)
    costs = StepCosts(cost_s, cost_s, wait_s=0.010, limit_s=1.0)
    (kept,), _ = admit_nodes([WeighedTree(draft, survivals)], 1, costs)
    return kept.num_nodes


def test_confidences_cut_the_verified_prefix():
    assert admitted(()) == 7
    assert admitted([0.95] * 7) == 7
    assert admitted([0.95, 0.95, 0.95, 0.05, 0.9, 0.9, 0.9]) == 3
    assert admitted([0.02] * 7) <= 1


@pytest.mark.parametrize("seed", range(8))
def test_admission_stops_a_tree_where_the_rate_stops_rising(seed):
    """CaDDTree's stop: nodes best first while (1 + their probabilities) / cost rises."""
    generator = np.random.default_rng(seed)
    probabilities = np.sort(generator.uniform(0.01, 0.9, 12))[::-1]
    tree = chain(range(12)).keep(range(1, 13))
    survivals = probabilities.tolist()
    cost_s = 0.030 + np.cumsum(np.concatenate(([0.0], np.sort(generator.uniform(0, 0.004, 12)))))
    rates = (1.0 + np.concatenate(([0.0], np.cumsum(probabilities)))) / cost_s
    best = next((n for n in range(12) if rates[n + 1] <= rates[n]), 12)
    costs = StepCosts(cost_s, cost_s, wait_s=0.0, limit_s=9.0)
    (kept,), rate = admit_nodes([WeighedTree(tree, survivals)], 1, costs)
    assert kept.num_nodes == best
    assert rate == pytest.approx(float(rates[best]))

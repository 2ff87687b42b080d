"""The planner in a world of fake drafters: what it chooses, and what it costs at worst."""

import pytest

from protos.exchange import Capabilities, Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from protos.params import SamplingParams
from protos.tree import CandidateTree, chain
from tests.benchmarks.planner_world import FakeDrafter, World
from verifier_service.engine.ports import (
    Draft,
    RoundOutcome,
    SequenceView,
    SourceInfo,
    SourcePlan,
)
from verifier_service.planning.costs import VerifyCosts, VerifyTable, default_table
from verifier_service.planning.planner import AdaptivePlanner
from verifier_service.planning.settings import PlannerSettings


def _planner() -> AdaptivePlanner:
    return AdaptivePlanner(VerifyCosts(default_table()))


def _fast_and_poor() -> FakeDrafter:
    return FakeDrafter("poor", lambda step: 0.25, 0.0001, spread=0.1, trees=False, local=True)


def _slow_and_good() -> FakeDrafter:
    return FakeDrafter("good", lambda step: 0.75, 0.004, 0.0015)


def _dying(at: int) -> FakeDrafter:
    return FakeDrafter("dying", lambda step: 0.7, 0.003, 0.001, alive=lambda step: step < at)


def _turning(at: int, before: float, after: float) -> FakeDrafter:
    return FakeDrafter(
        "turning", lambda step: before if step < at else after, 0.004, 0.0015, spread=0.0
    )


def test_the_choice_converges_to_the_good_drafter():
    world = World(_planner(), [_fast_and_poor(), _slow_and_good(), _dying(80)])
    world.run(300)
    late = world.run(300)
    assert late.asked["good"] > 0.9 * late.steps
    assert late.asked.get("dying", 0) < 0.05 * late.steps
    assert late.speedup > 1.7


def test_a_free_drafter_is_used_for_what_it_is_worth():
    late = World(_planner(), [_fast_and_poor()]).run(400)
    assert late.speedup > 1.2


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_hostile_drafter_is_switched_off_within_the_bound(concurrency: int):
    hostile = FakeDrafter("hostile", lambda step: 0.0, 0.008, 0.0015, spread=0.0)
    world = World(_planner(), [hostile], concurrency=concurrency)
    total = world.run(600)
    assert total.elapsed_s <= 1.05 * total.plain_s + 2.5 * total.plain_step_s
    assert total.worst_overrun_s <= 2.5 * total.plain_step_s
    assert world.run(400).asked.get("hostile", 0) < 20


def test_a_hostile_drafter_that_becomes_good_comes_back():
    world = World(_planner(), [_turning(400, 0.0, 0.8)])
    assert world.run(400).asked["turning"] < 40
    world.run(300)
    late = world.run(300)
    assert late.speedup > 1.8


def test_a_good_drafter_that_becomes_hostile_is_left_quickly():
    world = World(_planner(), [_turning(400, 0.8, 0.0)])
    world.run(400)
    assert world.run(300).asked["turning"] < 45


def test_a_dead_drafter_costs_no_more_than_the_bound():
    dead = FakeDrafter("dead", lambda step: 0.8, 0.008, alive=lambda step: False)
    total = World(_planner(), [dead]).run(600)
    assert total.elapsed_s <= 1.05 * total.plain_s + 2.5 * total.plain_step_s


def test_one_step_in_a_hundred_is_plain():
    planner = _planner()
    World(planner, [_fast_and_poor()]).run(500)
    assert planner.counts.num_plain_steps >= 5
    assert planner.counts.num_rounds == 500


def _view(mode: SpeculationMode, plan: Plan | None = None, names=(), remaining=50) -> SequenceView:
    return SequenceView(
        1, "r", [1] * 20, 19, SamplingParams(), Speculation(mode, names, plan), remaining, True
    )


def _info(name: str, *kinds: PlanKind, local: bool = False) -> SourceInfo:
    return SourceInfo(
        name,
        Capabilities(name, name, 1, kinds, max_depth=8, max_width=8, max_nodes=64),
        local,
        0.005,
        0.012,
    )


TREE = _info("eagle", PlanKind.CHAIN, PlanKind.TREE)
LOOKUP = _info("lookup", PlanKind.CHAIN, local=True)


def test_speculation_off_asks_and_admits_nothing():
    planner = _planner()
    plans, deadline_s = planner.plan([_view(SpeculationMode.OFF)], [TREE, LOOKUP])
    assert plans == [()]
    assert deadline_s == 0.0
    view = _view(SpeculationMode.OFF)
    assert planner.admit([view], [chain((1, 2))], 64)[0].num_nodes == 0


def test_a_fixed_plan_is_asked_every_round_whatever_it_costs():
    planner = _planner()
    plan = Plan(PlanKind.TREE, depth=6, width=8, nodes=31)
    for _ in range(300):
        view = _view(SpeculationMode.FIXED, plan, ("eagle",))
        (asked,), deadline_s = planner.plan([view], [TREE, LOOKUP])
        assert [(a.source, a.plan) for a in asked] == [("eagle", plan)]
        assert deadline_s >= 0.036
        tree = CandidateTree(tuple(range(31)), (0,) * 31, (-9.0,) * 31)
        assert planner.admit([view], [tree], 64, [(("eagle",),) * 31])[0] == tree
        wrong = Draft("eagle", 20, tree, (), 0.01)
        planner.observe_round(RoundOutcome(1, 20, tree, (), (wrong,), (99,), 0, 1))
        planner.observe_step(32, 32, 20, 0.06, 0.01)


def test_a_fixed_merged_tree_is_cut_to_the_given_nodes():
    planner = _planner()
    view = _view(SpeculationMode.FIXED, Plan(PlanKind.TREE, depth=6, width=8, nodes=31))
    (asked,), _ = planner.plan([view], [TREE, LOOKUP])
    assert {a.source: a.plan.kind for a in asked} == {
        "eagle": PlanKind.TREE,
        "lookup": PlanKind.CHAIN,
    }
    wide = CandidateTree(tuple(range(39)), (0,) * 39, tuple(-0.1 * i for i in range(39)))
    assert planner.admit([view], [wide], 64)[0].num_nodes == 31
    assert planner.admit([view], [wide], 10)[0].num_nodes == 10


def test_no_draft_reaches_past_the_last_token():
    planner = _planner()
    for mode in (SpeculationMode.AUTO, SpeculationMode.FIXED):
        (asked,), _ = planner.plan([_view(mode, remaining=3)], [TREE, LOOKUP])
        assert all(a.plan.depth <= 2 for a in asked)
        (asked,), _ = planner.plan([_view(mode, remaining=1)], [TREE, LOOKUP])
        assert asked == ()


def test_only_named_drafters_are_asked():
    planner = _planner()
    view = _view(SpeculationMode.AUTO, names=("lookup",))
    for _ in range(20):
        (asked,), deadline_s = planner.plan([view], [TREE, LOOKUP])
        assert {a.source for a in asked} <= {"lookup"}
        assert deadline_s <= 0.005


def test_prompts_are_not_drafted_for():
    view = SequenceView(
        1, "r", [1] * 20, 0, SamplingParams(), Speculation(), remaining=50, decoding=False
    )
    plans, deadline_s = _planner().plan([view], [LOOKUP, TREE])
    assert plans == [(SourcePlan("lookup", Plan()),)]
    assert deadline_s == 0.0


def test_a_source_is_fed_before_it_is_asked():
    planner = _planner()
    view = _view(SpeculationMode.AUTO)
    kinds = [planner.plan([view], [TREE])[0][0][0].plan.kind for _ in range(3)]
    assert kinds[0] is PlanKind.NONE
    assert kinds[-1] is not PlanKind.NONE


def test_a_source_that_is_not_used_is_hardly_fed():
    hostile = FakeDrafter("hostile", lambda step: 0.0, 0.008, 0.0015, spread=0.0)
    world = World(_planner(), [hostile], concurrency=8)
    world.run(600)
    late = world.run(400)
    assert late.fed.get("hostile", 0) < 0.01 * 8 * late.steps


def test_a_source_in_use_is_fed_with_prompts():
    world = World(planner := _planner(), [_slow_and_good()])
    world.run(300)
    prompt = SequenceView(
        10**6, "r", [1] * 500, 256, SamplingParams(), Speculation(), remaining=50, decoding=False
    )
    plans, _ = planner.plan([prompt], [_slow_and_good().info()])
    assert plans == [(SourcePlan("good", Plan()),)]


def test_the_wait_is_never_above_what_the_bank_can_pay():
    slow = SourceInfo("slow", TREE.capabilities, False, 0.020, 5.0)
    planner = AdaptivePlanner(VerifyCosts(default_table()), PlannerSettings(grant_steps=1.0))
    waits = [planner.plan([_view(SpeculationMode.AUTO)], [slow])[1] for _ in range(4)]
    assert 0.0 < max(waits) <= 1.05 * 0.030 + 1e-9


def test_a_request_that_left_leaves_nothing_behind():
    planner = _planner()
    World(planner, [_fast_and_poor(), _slow_and_good()], length=20).run(60)
    held = [len(part._by_request) for part in (planner._evidence, planner._calibration)] + [
        len(planner._prospects._cache),
        len(planner._bank._accounts),
    ]
    assert max(held) <= 3


def test_a_price_that_was_measured_wrong_is_found_out():
    dear = VerifyTable({1: 0.03, 4: 0.3, 16: 0.5}, {}, 200)
    world = World(AdaptivePlanner(VerifyCosts(dear)), [_fast_and_good()])
    # Without any gain the bank can hardly pay for a look; with a first gain it can.
    world.run(600)
    assert world.run(300).speedup > 1.3


def _fast_and_good() -> FakeDrafter:
    return FakeDrafter("lookup", lambda step: 0.6, 0.0001, spread=0.1, trees=False, local=True)

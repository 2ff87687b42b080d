"""Whole generations of the public loops, replayed in the engine: same text, same acceptance."""

import json

import pytest

from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from protos.exchange import Plan, PlanKind
from tests.fakes import request
from tests.integration.block_house import BlockHouse
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner

LIMITS = DrafterLimits(max_nodes=60, max_width=64, max_context=256)


def house_of(golden_dir, name, kind, plan, fused=True):
    checkpoint = golden_dir / "dflash" / name
    target = golden_dir / "dflash" / "target"
    settings = DrafterSettings(
        kind=kind, name="block", checkpoint=str(checkpoint), dtype="fp32", limits=LIMITS
    )
    drafter = build_drafter(settings, target)
    planner = StaticPlanner([SourcePlan("block", plan)])
    return BlockHouse(target, [drafter], [checkpoint if fused else None], planner)


def runs_of(golden_dir, folder):
    runs = json.loads((golden_dir / "dflash" / folder / "generate.json").read_text())["runs"]
    return [run for run in runs if not run.get("temperature") and run.get("block_size", 8) == 8]


def replay(house, run, name):
    prompt = run.get("prompt")
    asked = request(
        name,
        prompt,
        run["max_new_tokens"],
        ignore_eos=True,
        stop_token_ids=tuple(run["stop_token_ids"] or ()),
    )
    text = house.run([asked])[name]
    assert [*prompt, *text] == run["output_ids"]
    return house.rounds(name), len(text) - 1


def assert_same_rounds(ours, theirs, remaining):
    """The public loops do not trim their last rounds; ours draft no further than the end."""
    for got, expected in zip(ours, theirs, strict=False):
        assert got == min(expected, remaining)
        remaining -= got
    assert len(ours) <= len(theirs)


@pytest.mark.parametrize("fused", [True, False])
def test_dflash_commits_what_the_public_loop_commits(golden_dir, fused):
    house = house_of(golden_dir, "dflash_v1_generate", "dflash", Plan(PlanKind.BLOCK, 7), fused)
    for number, run in enumerate(runs_of(golden_dir, "dflash_v1_generate")):
        ours, remaining = replay(house, run, f"{run['tag']}{number}")
        assert_same_rounds(ours, run["acceptance_lengths"], remaining)


def test_dspark_commits_what_the_public_loop_commits(golden_dir):
    house = house_of(golden_dir, "dspark_generate", "dspark", Plan(PlanKind.BLOCK, 7))
    for number, run in enumerate(runs_of(golden_dir, "dspark_generate")):
        if run["confidence_threshold"]:
            continue
        ours, remaining = replay(house, run, f"{run['tag']}{number}")
        assert_same_rounds(ours, run["acceptance_lengths"], remaining)


@pytest.mark.parametrize("budget", [8, 16, 60])
def test_trees_commit_what_the_public_loop_commits(golden_dir, budget):
    plan = Plan(PlanKind.BLOCK, 7, 1, budget)
    house = house_of(golden_dir, "dflash_v1_generate", "dflash", plan)
    for number, run in enumerate(runs_of(golden_dir, "ddtree")):
        if run["tree_budget"] != budget:
            continue
        ours, remaining = replay(house, run, f"{run['tag']}{number}")
        # Its last rounds are no deeper than what remains: a tree of that depth is another tree.
        assert ours[:-2] == run["acceptance_lengths"][: len(ours) - 2]
        assert sum(ours) == remaining

"""Drafters of blocks, and draft models, replayed: they count what a live run counts."""

from pathlib import Path

import pytest

from protos.digest import directory_digest
from protos.exchange import Plan, PlanKind
from tests.fixtures.make_perfect_blocks import AUX, PROMPTS
from tests.integration.replay_house import TREE, house_of, live, make_world, ngram, replayed
from tests.tiny import tiny_llama_dir

KINDS = ("dflash", "dspark")
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ASKED = (*PROMPTS[:2], (11, 45, 99, 3, 250))
PLANS = {
    "block": Plan(PlanKind.BLOCK, depth=16),
    "block tree": Plan(PlanKind.BLOCK, depth=16, nodes=31),
    "chain": Plan(PlanKind.CHAIN, depth=4),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The target that the block drafters know."""
    directory = tiny_llama_dir(tmp_path_factory.mktemp("known"))
    if directory_digest(directory) != (FIXTURES / "target_digest.txt").read_text().strip():
        pytest.skip("another torch draws another target: run tests.fixtures.make_perfect_blocks")
    return make_world(directory, tmp_path_factory.mktemp("cache"), ASKED, AUX)


def block(world, kind):
    return world.head(kind, FIXTURES / f"perfect_{kind}", kind)


def model(world):
    """The target, drafting for itself."""
    return world.head("draft_model", world.target, "model")


@pytest.fixture(scope="module")
def house(known):
    """The engine with all drafters in its process."""
    drafters = [ngram(), *(block(known, kind) for kind in KINDS), model(known)]
    return house_of(known, drafters)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_drafter_counts_as_live(known, house, kind, plan, temperature):
    texts = known.texts[temperature]
    expected = live(house, texts, [kind], plan)
    assert replayed(texts, [block(known, kind)], plan) == expected
    assert temperature or sum(one["accepted"] for one in expected) > 20


def test_a_block_merged_with_a_look_up_counts_as_live(known, house):
    texts = known.texts[0.0]
    plan = Plan(PlanKind.BLOCK, depth=16, nodes=9)
    expected = live(house, texts, ["ngram", "dspark"], plan)
    assert replayed(texts, [ngram(), block(known, "dspark")], plan) == expected


def test_a_draft_model_counts_as_live_and_needs_no_rows(known, house):
    texts = known.texts[1.0]
    expected = live(house, texts, ["model"], TREE)
    assert replayed(texts, [model(known)], TREE) == expected
    assert sum(one["accepted"] for one in expected) > 20

"""A replay counts what a live run counts: same rounds, commits, drafts and accepted depths.

The live side is the real engine over a real tiny target with real drafters in its process; the
replay sees recorded texts and rows only. Heads that know some of the texts by heart make long
accepted runs, prompts they do not know make short ones, and a target with a frequent end of text
makes drafts that reach past it.
"""

import json
import shutil
from dataclasses import replace

import pytest

from cluster.tools.evaluate_heads import best_reading, build_head, find_heads
from drafter_service.replay import Source, replay, replay_drafter
from protos.digest import directory_digest
from tests.integration.replay_house import (
    CHAIN4,
    NGRAM8,
    SMALL_TREE,
    TREE,
    house_of,
    live,
    make_world,
    ngram,
    replayed,
    with_end,
)
from tests.perfect_heads.overfit import HERE, PROMPTS, target_dir
from verifier_service.planning.costs import VerifyCosts, default_table
from verifier_service.planning.fixed_admission import FixedAdmission
from verifier_service.planning.planner import AdaptivePlanner

UNKNOWN = tuple(3 + 7 * j for j in range(9))
ASKED = (*PROMPTS[:2], UNKNOWN)
LAYERS = (0, 1, 65535)
KINDS = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3"}


def head(world, name="eagle3"):
    return world.head(KINDS[name], HERE / name, name)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The target that the heads know."""
    directory = target_dir(tmp_path_factory.mktemp("known"))
    if directory_digest(directory) != (HERE / "target_digest.txt").read_text().strip():
        pytest.skip("another torch draws another target: run tests.perfect_heads.overfit")
    return make_world(directory, tmp_path_factory.mktemp("cache"), ASKED, LAYERS)


@pytest.fixture(scope="module")
def house(known):
    """The engine with all drafters in its process; rows are raw."""
    return house_of(known, [ngram(), *(head(known, name) for name in KINDS)])


@pytest.fixture(scope="module")
def ending(known, tmp_path_factory):
    """A token that the heads foresee ends the text."""
    text = known.texts[0.0][0]
    directory = tmp_path_factory.mktemp("ending") / "target"
    with_end(known.target, directory, text.tokens[text.prompt_len + 12])
    return make_world(directory, tmp_path_factory.mktemp("cache"), ASKED, LAYERS, (0.0,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "plan"),
    [("eagle3", CHAIN4), ("eagle3", TREE), ("eagle", SMALL_TREE), ("peagle", TREE)],
    ids=["eagle3-chain4", "eagle3-tree", "eagle-small", "peagle-tree"],
)
def test_a_head_counts_as_live(known, house, name, plan, temperature):
    texts = known.texts[temperature]
    expected = live(house, texts, [name], plan)
    assert replayed(texts, [head(known, name)], plan) == expected
    assert sum(one["accepted"] for one in expected) > (20 if temperature < 1 else 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_look_up_counts_as_live(known, house, temperature):
    texts = known.texts[temperature]
    assert replayed(texts, [ngram()], NGRAM8) == live(house, texts, ["ngram"], NGRAM8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [TREE, SMALL_TREE], ids=["tree", "small"])
def test_merged_drafts_count_as_live(known, house, plan, temperature):
    texts = known.texts[temperature]
    expected = live(house, texts, ["ngram", "eagle3"], plan)
    assert replayed(texts, [ngram(), head(known)], plan) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_merged_drafts_count_as_live_where_a_planner_learns_what_scores_are_worth(
    known, temperature
):
    texts = known.texts[temperature]
    planner = AdaptivePlanner(VerifyCosts(default_table()))
    engine = house_of(known, [ngram(), head(known)], planner)
    expected = live(engine, texts, ["ngram", "eagle3"], SMALL_TREE)
    assert replayed(texts, [ngram(), head(known)], SMALL_TREE, FixedAdmission()) == expected


def test_raw_rows_count_as_rows_that_the_verifier_projected(known):
    texts = known.texts[0.0]
    engine = house_of(known, [head(known)], checkpoints=[HERE / "eagle3"])
    assert replayed(texts, [head(known)], TREE) == live(engine, texts, ["eagle3"], TREE)


def test_drafts_that_reach_past_the_end_count_as_live(ending):
    texts = ending.texts[0.0]
    assert any(text.end < text.max_len for text in texts)
    engine = house_of(ending, [head(ending)])
    for plan in (CHAIN4, TREE):
        expected = live(engine, texts, ["eagle3"], plan)
        assert replayed(texts, [head(ending)], plan) == expected
        assert any(one["accepted"] > one["committed"] - one["rounds"] for one in expected)


def test_counts_do_not_depend_on_how_many_texts_run_at_once(known):
    texts = known.texts[1.0]
    together = replayed(texts, [head(known)], TREE)
    assert replayed(texts, [head(known)], TREE, window=1) == together
    assert replayed(texts, [head(known)], TREE, window=3) == together


def test_a_drafter_that_loses_its_sessions_is_shown_them_again(known):
    class Forgetful:
        """Drops every session after every third batch."""

        def __init__(self, inner):
            self.inner, self.batches = inner, 0
            self.capabilities = inner.capabilities

        def handle(self, works):
            self.batches += 1
            if self.batches % 3 == 0:
                for session in self.inner.sessions:
                    self.inner.sessions.drop(session.session_id)
            return self.inner.handle(works)

        def load(self):
            return self.inner.load()

    texts = known.texts[0.0]
    forgetful = Forgetful(head(known))
    assert replayed(texts, [forgetful], CHAIN4) == replayed(texts, [head(known)], CHAIN4)
    assert forgetful.batches > 20


def test_texts_that_end_with_their_first_token_have_no_rounds(known):
    text = known.texts[0.0][0]
    short = replace(text, end=text.prompt_len + 1)
    (counts, other) = replay([short, text], [Source("n", ngram())], NGRAM8)
    assert (counts.num_rounds, counts.tau) == (0, 1.0)
    assert other.num_committed == text.end - text.prompt_len - 1


def test_of_a_checkpoint_that_is_open_the_reading_that_guesses_best_is_replayed(known, tmp_path):
    """The head in SpecForge's words, which do not say what its output norm is for."""
    config = json.loads((HERE / "eagle3" / "config.json").read_text())
    flat = config | config["transformer_layer_config"]
    for key in ("transformer_layer_config", "speculators_config", "speculators_model_type"):
        flat.pop(key)
    flat["architectures"] = ["LlamaForCausalLMEagle3"]
    flat["eagle_aux_hidden_state_layer_ids"] = [0, 1]
    shutil.copytree(HERE / "eagle3", tmp_path / "forge")
    (tmp_path / "forge" / "config.json").write_text(json.dumps(flat))
    (found,) = find_heads([str(tmp_path / "forge")], known.target)
    assert [reading.label for reading in found.readings] == ["as written", "normed feedback"]

    def build(variant):
        return build_head(found, variant, known.target, "fp32", 4, 64)

    texts = known.texts[0.0]
    best = best_reading(found, build, texts)
    assert best.label == "normed feedback"
    again, plain = (
        replay_drafter(drafter, texts, TREE) for drafter in (build(best.label), head(known))
    )
    assert again.accepted_by_depth == plain.accepted_by_depth

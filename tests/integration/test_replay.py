"""A replay counts what a live run counts: same rounds, commits, drafts and accepted depths.

The live side is the real engine over a real tiny target with real drafters in its process; the
replay sees recorded texts and rows only. Heads that know some of the texts by heart make long
accepted runs, prompts they do not know make short ones, and a target with a frequent end of text
makes drafts that reach past it.
"""

from dataclasses import replace

import pytest

from drafter_service.replay import Source, replay
from protos.digest import directory_digest
from tests.integration.replay_house import (
    CHAIN4,
    NGRAM8,
    SMALL_TREE,
    TREE,
    live,
    make_world,
    ngram,
    replayed,
    with_end,
)
from tests.perfect_heads.overfit import HERE, PROMPTS, target_dir
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.planning.costs import VerifyCosts, default_table
from verifier_service.planning.fixed_admission import FixedAdmission
from verifier_service.planning.planner import AdaptivePlanner

UNKNOWN = tuple(tuple(3 + (29 * n + 7 * j) % 250 for j in range(9 + 4 * n)) for n in range(2))
ASKED = (*PROMPTS[:2], *UNKNOWN)
LAYERS = (0, 1, 65535)
KINDS = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3"}


def head(world, name="eagle3"):
    return world.head(KINDS[name], HERE / name)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The target that the heads know."""
    directory = target_dir(tmp_path_factory.mktemp("known"))
    if directory_digest(directory) != (HERE / "target_digest.txt").read_text().strip():
        pytest.skip("another torch draws another target: run tests.perfect_heads.overfit")
    return make_world(directory, tmp_path_factory.mktemp("cache"), ASKED, LAYERS)


@pytest.fixture(scope="module")
def ending(known, tmp_path_factory):
    """A token that the heads foresee ends the text."""
    text = known.texts[0.0][0]
    directory = tmp_path_factory.mktemp("ending") / "target"
    with_end(known.target, directory, text.tokens[text.prompt_len + 12])
    return make_world(directory, tmp_path_factory.mktemp("cache"), ASKED, LAYERS, (0.0,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [CHAIN4, TREE], ids=["chain4", "tree"])
@pytest.mark.parametrize("name", KINDS)
def test_a_head_counts_as_live(known, name, plan, temperature):
    texts = known.texts[temperature]
    expected = live(known, texts, [head(known, name)], plan, StaticPlanner(deadline_s=5.0))
    assert replayed(texts, [head(known, name)], plan) == expected
    assert sum(one["accepted"] for one in expected) > (20 if temperature < 1 else 5)


def test_raw_rows_count_as_rows_that_the_verifier_projected(known):
    texts = known.texts[0.0]
    expected = live(
        known, texts, [head(known)], TREE, StaticPlanner(deadline_s=5.0), [HERE / "eagle3"]
    )
    assert replayed(texts, [head(known)], TREE) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_look_up_counts_as_live(known, temperature):
    texts = known.texts[temperature]
    expected = live(known, texts, [ngram()], NGRAM8, StaticPlanner(deadline_s=5.0))
    assert replayed(texts, [ngram()], NGRAM8) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [TREE, SMALL_TREE], ids=["tree", "small"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["scores", "calibrated"])
def test_merged_drafts_count_as_live(known, plan, temperature, adaptive):
    texts = known.texts[temperature]
    planner = StaticPlanner(deadline_s=5.0)
    if adaptive:
        planner = AdaptivePlanner(VerifyCosts(default_table()))
    expected = live(known, texts, [ngram(), head(known)], plan, planner)
    admission = FixedAdmission() if adaptive else None
    assert replayed(texts, [ngram(), head(known)], plan, admission) == expected


@pytest.mark.parametrize("plan", [CHAIN4, TREE], ids=["chain4", "tree"])
def test_drafts_that_reach_past_the_end_count_as_live(ending, plan):
    texts = ending.texts[0.0]
    assert any(text.end < text.max_len for text in texts)
    expected = live(ending, texts, [head(ending)], plan, StaticPlanner(deadline_s=5.0))
    assert replayed(texts, [head(ending)], plan) == expected
    assert any(one["accepted"] > one["committed"] - one["rounds"] for one in expected)


@pytest.mark.parametrize("window", [1, 3])
def test_counts_do_not_depend_on_how_many_texts_run_at_once(known, window):
    texts = known.texts[1.0]
    together = replayed(texts, [head(known)], TREE)
    assert replayed(texts, [head(known)], TREE, window=window) == together


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

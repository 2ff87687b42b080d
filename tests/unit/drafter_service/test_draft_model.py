"""`draft_model` drafts what its plain definition drafts: cached, batched, sampled, cut back."""

import pytest
import torch
from transformers import MistralConfig

from drafter_service.draft_model.model import read_model
from drafter_service.draft_model.reference import draft_reference
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.params import Acceptance, SamplingParams
from tests.tiny import tiny_llama_dir, tiny_qwen3_dir, write_tiny
from tests.unit.drafter_service.draft_model_cases import (
    load_tiny,
    next_work,
    one,
    open_work,
    text,
)

VOCAB = 384
CHAIN = Plan(PlanKind.CHAIN, 4)
TREE = Plan(PlanKind.TREE, 4, 4, 14)
STATIC = Plan(PlanKind.STATIC, 5, 1, 25)
ABSORB = Plan()
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
WARM = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=64)
COINS = SamplingParams(temperature=0.9, seed=11, max_tokens=64, acceptance=Acceptance.REJECTION)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("llama"), layers=2)


@pytest.fixture(scope="module")
def plain(llama):
    return read_model(llama, torch.float32, attention="eager")


def reference(model, tokens, params, plan):
    return draft_reference(model, tokens, params, plan, VOCAB)


def assert_same(result, expected):
    assert result.status is DraftStatus.OK, result.detail
    assert result.tree.tokens == expected.tree.tokens
    assert result.tree.parents == expected.tree.parents
    assert result.tree.scores == pytest.approx(expected.tree.scores, abs=2e-2)
    assert result.ranked_ids == expected.ranked_ids
    assert [q.ids for q in result.q] == [q.ids for q in expected.q]


@pytest.mark.parametrize("plan", [CHAIN, TREE, STATIC])
@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_cached_rounds_draft_what_a_full_recomputation_drafts(llama, plain, plan, params):
    drafter = load_tiny(llama)
    tokens = text(1, 30)
    result = one(drafter, open_work(tokens, params, plan))
    for num_followed in (0, 2, 3, 1, 4):
        expected = reference(plain, tokens, params, plan)
        assert_same(result, expected)
        # The text follows one path of the draft for a while, not always the best one.
        node, held = 0, len(tokens)
        for _ in range(num_followed):
            children = result.tree.children()[node]
            if not children:
                break
            token, node = sorted(children.items())[-1]
            tokens.append(token)
        tokens.append(5 + num_followed)
        result = one(drafter, next_work(tokens, held, plan))


def test_chains_for_rejection_are_what_the_definition_draws(llama, plain):
    drafter = load_tiny(llama)
    tokens = text(2, 12)
    result = one(drafter, open_work(tokens, COINS, CHAIN))
    assert_same(result, reference(plain, tokens, COINS, CHAIN))
    assert len(result.q) == 4
    for q, token in zip(result.q, result.tree.tokens, strict=True):
        assert token in q.ids
        assert len(q.ids) == 64
    (refused,) = drafter.handle([open_work(tokens, COINS, TREE, session_id=2)])
    assert refused.status is DraftStatus.REFUSED


@pytest.mark.parametrize("plan", [CHAIN, TREE])
def test_sessions_together_draft_as_if_alone(llama, plan):
    many = [GREEDY, WARM, COINS if plan is CHAIN else GREEDY]
    together, alone = load_tiny(llama), [load_tiny(llama) for _ in many]
    texts = [text(seed, 10 + 37 * seed) for seed in range(3)]
    for round_number in range(3):
        works = []
        for i, (params, tokens) in enumerate(zip(many, texts, strict=True)):
            if round_number == 0:
                works.append(open_work(tokens, params, plan, session_id=i + 1))
            else:
                held = len(tokens)
                tokens.extend(text(100 * round_number + i, 1 + i))
                works.append(next_work(tokens, held, plan, session_id=i + 1))
        for result, drafter, entry in zip(together.handle(works), alone, works, strict=True):
            expected = one(drafter, entry)
            assert_same(result, expected)


def test_rows_that_a_draft_wrote_are_kept_when_its_tokens_are_committed(llama):
    """Only the rows that nobody computed are computed again."""
    drafter = load_tiny(llama)
    counted = []
    step = drafter._algorithm._model.step

    def counting(ids, parts, wanted):
        counted.append(len(ids))
        return step(ids, parts, wanted)

    drafter._algorithm._model.step = counting
    tokens = text(3, 20)
    result = one(drafter, open_work(tokens, GREEDY, CHAIN))
    assert counted == [20, 1, 1, 1]
    held = len(tokens)
    tokens.extend([*result.tree.tokens, 7])
    counted.clear()
    one(drafter, next_work(tokens, held, CHAIN))
    # The last drafted token was never expanded; the bonus is new.
    assert counted == [2, 1, 1, 1]


def test_a_session_cut_back_forgets_what_stood_behind(llama, plain):
    drafter = load_tiny(llama)
    tokens = text(4, 40)
    one(drafter, open_work(tokens, GREEDY, TREE))
    shorter = [*tokens[:25], 9]
    lost = one(drafter, next_work(shorter, 20, TREE))
    assert lost.status is DraftStatus.LOST
    assert lost.held_tokens == 25
    assert_same(one(drafter, next_work(shorter, 25, TREE)), reference(plain, shorter, GREEDY, TREE))


def test_long_prompts_are_computed_in_shares(llama, plain, monkeypatch):
    monkeypatch.setattr("drafter_service.draft_model.drafter.ROWS_PER_FORWARD", 16)
    monkeypatch.setattr("drafter_service.draft_model.drafter.ROWS_PER_ROUND", 40)
    drafter = load_tiny(llama)
    tokens, short = text(5, 100), text(6, 8)
    works = [open_work(tokens, GREEDY, CHAIN), open_work(short, GREEDY, CHAIN, session_id=2)]
    first, beside = drafter.handle(works)
    assert first.status is DraftStatus.NOT_READY
    assert_same(beside, reference(plain, short, GREEDY, CHAIN))
    again = next_work(tokens, len(tokens), CHAIN)
    assert one(drafter, again).status is DraftStatus.NOT_READY
    assert_same(one(drafter, again), reference(plain, tokens, GREEDY, CHAIN))


def test_absorbed_tokens_are_not_computed_again(llama, plain):
    drafter = load_tiny(llama)
    tokens = text(7, 20)
    assert one(drafter, open_work(tokens, GREEDY, ABSORB)).tree.num_nodes == 0
    assert_same(one(drafter, next_work(tokens, 20, CHAIN)), reference(plain, tokens, GREEDY, CHAIN))


def test_sessions_are_lost_when_the_budget_is_spent_never_wrong(llama, plain):
    # 1 MiB of 2 layers, 2 heads of 16, float32: 2048 rows.
    drafter = load_tiny(llama, cache_mb=1, max_sessions=32)
    texts = [text(seed, 300) for seed in range(8)]
    for i, tokens in enumerate(texts):
        opened = one(drafter, open_work(tokens, GREEDY, CHAIN, session_id=i + 1))
        assert opened.status is DraftStatus.OK
    statuses = []
    for i, tokens in enumerate(texts):
        held = len(tokens)
        tokens.append(9)
        result = one(drafter, next_work(tokens, held, CHAIN, session_id=i + 1))
        statuses.append(result.status)
        if result.status is DraftStatus.OK:
            assert_same(result, reference(plain, tokens, GREEDY, CHAIN))
        else:
            assert result.held_tokens == 0
    assert set(statuses) == {DraftStatus.OK, DraftStatus.LOST}


def test_a_token_that_breaks_the_model_costs_its_own_session_alone(llama, plain):
    """Its embedding is not a number; nothing of it reaches the sessions beside it."""
    drafter = load_tiny(llama)
    tokens = text(9, 40)
    expected = reference(plain, tokens, GREEDY, TREE)
    bad = next(i for i in range(VOCAB) if i not in (*tokens, *expected.tree.tokens))
    embedding = drafter._algorithm._model._model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[bad] = float("nan")
    works = [open_work([7, bad, 9], GREEDY, TREE), open_work(tokens, GREEDY, TREE, session_id=2)]
    works.append(open_work([bad], COINS, CHAIN, session_id=3))
    broken, good, sampled = drafter.handle(works)
    assert broken.status is sampled.status is DraftStatus.REFUSED
    assert "finite" in broken.detail
    assert_same(good, expected)


def test_other_families_run_through_the_same_attention(tmp_path):
    """Norms on queries and keys, a head_dim of its own, and windows shorter than the text."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    windowed = write_tiny(MistralConfig(sliding_window=8, **sizes), tmp_path / "mistral", 3)
    for directory in (tiny_qwen3_dir(tmp_path / "qwen3", layers=2), windowed):
        plain = read_model(directory, torch.float32, attention="eager")
        drafter = load_tiny(directory)
        for plan in (CHAIN, TREE):
            tokens = text(8, 30)
            session_id = 1 if plan is CHAIN else 2
            result = one(drafter, open_work(tokens, GREEDY, plan, session_id))
            assert_same(result, reference(plain, tokens, GREEDY, plan))
            held = len(tokens)
            tokens.extend([*result.tree.tokens[:1], 4])
            result = one(drafter, next_work(tokens, held, plan, session_id))
            assert_same(result, reference(plain, tokens, GREEDY, plan))

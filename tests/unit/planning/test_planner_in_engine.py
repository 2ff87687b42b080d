"""The real planner advises the real engine: the text never changes, and good drafts are used."""

import dataclasses

import pytest

from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    constant_source,
    future_source,
    random_source,
    request,
    small_settings,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.planning.costs import VerifyCosts, default_table
from verifier_service.planning.planner import AdaptivePlanner

VOCAB = 97
PROMPTS = {f"r{i}": [(7 * i + j) % VOCAB for j in range(3 + 9 * i)] for i in range(4)}
LENGTH = 120


def _requests():
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        temperature = 0.9 if number % 2 else 0.0
        yield request(name, prompt, LENGTH, temperature=temperature, seed=number)


def _run(planner, drafting) -> tuple[dict[str, tuple[int, ...]], Engine]:
    engine = Engine(HashTarget(VOCAB), drafting, planner, small_settings(num_slots=1024))
    client = Client(engine)
    for one in _requests():
        client.submit(one)
    texts = client.finish()
    engine.check_idle()
    return texts, engine


@pytest.fixture(scope="module")
def plain():
    return _run(StaticPlanner(), FakeDrafting())[0]


def _planner() -> AdaptivePlanner:
    return AdaptivePlanner(VerifyCosts(default_table()))


def _futures(plain):
    return {name: [*PROMPTS[name], *ids] for name, ids in plain.items()}


@pytest.mark.parametrize("lag", [False, True])
def test_the_text_is_the_targets_whatever_the_planner_makes_of_its_sources(plain, lag: bool):
    sources = {
        "good": future_source(_futures(plain), VOCAB, error_rate=0.2),
        "liar": random_source(VOCAB),
        "one": constant_source(3),
    }
    drafting = FakeDrafting(sources, lag=lag)
    texts, _ = _run(_planner(), drafting)
    assert texts == plain
    assert any(ask.plans for asks in drafting.asked for ask in asks)


def test_failing_exchanges_cost_drafts_and_nothing_else(plain):
    drafting = FakeDrafting({"good": future_source(_futures(plain), VOCAB)}, fail_every=3)
    texts, _ = _run(_planner(), drafting)
    assert texts == plain


def test_good_drafts_are_used(plain):
    drafting = FakeDrafting({"good": future_source(_futures(plain), VOCAB, error_rate=0.05)})
    _, engine = _run(_planner(), drafting)
    stats = engine.stats()
    assert stats.num_accepted > 0.3 * stats.num_output_tokens


def test_a_liar_beside_a_good_source_is_hardly_verified(plain):
    sources = {
        "good": future_source(_futures(plain), VOCAB, error_rate=0.05),
        "liar": random_source(VOCAB),
    }
    _, engine = _run(_planner(), FakeDrafting(sources))
    drafted = dict(engine.stats().drafted_by_source)
    assert drafted.get("liar", 0) < 0.5 * drafted["good"]


def test_counts_add_up_to_what_the_engine_saw(plain):
    planner = _planner()
    drafting = FakeDrafting({"good": future_source(_futures(plain), VOCAB)})
    _, engine = _run(planner, drafting)
    counts, stats = planner.counts, engine.stats()
    assert counts.num_steps == stats.num_steps
    assert counts.num_drafted == stats.num_drafted
    assert counts.num_accepted == stats.num_accepted
    assert all(
        value >= 0 for value in dataclasses.asdict(counts).values() if not isinstance(value, dict)
    )

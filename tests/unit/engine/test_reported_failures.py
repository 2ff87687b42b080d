"""Failures that users of comparable engines reported, none of which may happen here.

Only those that no other file of this folder holds already; each docstring names what was reported.
"""

import random
from dataclasses import replace

import pytest

from protos.errors import ContextTooLong
from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason
from protos.options import LogitOptions
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
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner

VOCAB = 97
BLOCK = 6


def engine_with(
    source=None, depth: int = BLOCK, kind: PlanKind = PlanKind.CHAIN, **settings: int
) -> Engine:
    """source: drafts every round; None: plain decoding."""
    drafting = FakeDrafting({"x": source} if source else {})
    plan = SourcePlan("x", Plan(kind, depth=depth, width=1, nodes=depth))
    planner = StaticPlanner([plan] if source else [])
    return Engine(HashTarget(VOCAB), drafting, planner, small_settings(**settings))


def text_of(prompt, max_tokens: int, **sampling) -> tuple[int, ...]:
    client = Client(engine_with())
    client.submit(request("t", prompt, max_tokens, **sampling))
    return client.finish()["t"]


@pytest.mark.parametrize("token", [5, 96])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_first_drafted_token_is_compared_like_any_other(token: int, depth: int):
    """C02: a one-token draft was committed unseen, above all behind equal tokens."""
    client = Client(engine_with(constant_source(token), depth))
    for prompt in ([token] * 3, [1], [token]):
        name = str(len(client.runs))
        client.submit(request(name, prompt, 20))
        assert client.finish()[name] == text_of(prompt, 20)
    assert client.engine.stats().num_drafted > 0


def test_penalties_work_inside_accepted_runs_as_without_drafts():
    """C12: penalties had no effect, or saw stale counts, where drafts were verified."""
    prompt = [4, 9] * 6
    wanted = {
        "-2": LogitOptions(frequency_penalty=-2.0),
        "0": LogitOptions(),
        "2": LogitOptions(frequency_penalty=2.0),
        "1.3": LogitOptions(repetition_penalty=1.3),
    }
    plain = Client(engine_with())
    for name, options in wanted.items():
        plain.submit(replace(request(name, prompt, 60), options=options))
    texts = plain.finish()
    assert len(set(texts["-2"])) < len(set(texts["0"])) < len(set(texts["2"]))
    futures = {name: (*prompt, *text) for name, text in texts.items()}
    client = Client(engine_with(future_source(futures, VOCAB), 8, max_tokens_per_step=256))
    for name, options in wanted.items():
        client.submit(replace(request(name, prompt, 60), options=options))
    assert client.finish() == texts
    assert client.engine.stats().num_accepted > 4 * 40, "whole runs were accepted"


@pytest.mark.parametrize("num_prompt", [1, 2, BLOCK - 1])
def test_requests_shorter_than_a_draft_leave_their_neighbour_alone(num_prompt: int):
    """C33: requests of one token, or of a prompt shorter than the draft, broke a round."""
    long_prompt = [3, 4, 5]
    long = text_of(long_prompt, 120)
    texts = {"long": (*long_prompt, *long)}
    prompts = {
        f"s{n}": [(7 * n + j) % VOCAB for j in range(num_prompt)] for n in range(1, BLOCK + 3)
    }
    wholes = {name: text_of(prompt, BLOCK + 3) for name, prompt in prompts.items()}
    texts |= {name: (*prompt, *wholes[name]) for name, prompt in prompts.items()}

    alone = Client(engine_with(future_source(texts, VOCAB)))
    alone.submit(request("long", long_prompt, 120))
    alone.finish()
    client = Client(engine_with(future_source(texts, VOCAB), max_tokens_per_step=256))
    client.submit(request("long", long_prompt, 120))
    for n, (name, prompt) in enumerate(prompts.items(), 1):
        client.submit(request(name, prompt, n))
        client.engine.step()
    client.finish()
    for n, name in enumerate(prompts, 1):
        assert client.ids(name) == wholes[name][:n]
        assert client.last(name).finish_reason is FinishReason.LENGTH
    assert client.ids("long") == long
    here, there = client.last("long").counts, alone.last("long").counts
    assert here is not None
    assert there is not None
    assert (here.num_rounds, here.num_accepted) == (there.num_rounds, there.num_accepted)
    assert here.num_accepted > 90


def test_a_seed_decides_the_text_and_another_seed_another():
    """C16: the seed of a request was ignored where drafts were verified."""
    plain = [text_of([1, 2], 16, temperature=1.0, seed=seed) for seed in range(1, 21)]
    assert len(set(plain)) == 20
    for _ in range(2):
        client = Client(engine_with(random_source(VOCAB)))
        for seed in range(1, 21):
            client.submit(request(str(seed), [1, 2], 16, temperature=1.0, seed=seed))
        texts = client.finish()
        assert [texts[str(seed)] for seed in range(1, 21)] == plain


@pytest.mark.parametrize("quality", ["none", "right", "wrong"])
def test_growing_turns_find_as_much_with_drafts_as_without(quality: str):
    """C66: drafting halved the hits of a prefix cache, and only the speed showed it."""
    turns: list[list[int]] = []
    prompt = [(5 * j) % VOCAB for j in range(30)]
    for turn in range(10):
        turns.append(prompt)
        prompt = [*prompt, *text_of(prompt, 11, temperature=0.8, seed=1), turn, turn + 1]
    texts = {
        str(n): (*turn, *text_of(turn, 11, temperature=0.8, seed=1)) for n, turn in enumerate(turns)
    }
    sources = {
        "none": None,
        "right": future_source(texts, VOCAB),
        "wrong": random_source(VOCAB, 2),
    }
    client = Client(engine_with(sources[quality], kind=PlanKind.TREE, num_slots=2048))
    found = []
    for n, turn in enumerate(turns):
        client.submit(request(str(n), turn, 11, temperature=0.8, seed=1))
        client.finish()
        counts = client.last(str(n)).counts
        assert counts is not None
        found.append(counts.num_cached)
    # All but the last token of the turn before, in whole pages of four.
    assert found == [0, *((len(turn) + 11 - 1) // 4 * 4 for turn in turns[:-1])]


def test_five_hundred_requests_that_leave_at_any_moment_leave_nothing():
    """C67: pages of requests that were aborted stayed taken, until nobody was let in any more."""
    rng = random.Random(3)
    drafting = FakeDrafting({"x": random_source(VOCAB, 1)}, lag=True, fail_every=5)
    planner = StaticPlanner([SourcePlan("x", Plan(PlanKind.TREE, depth=3, width=2, nodes=6))])
    sizes = small_settings(num_slots=256, max_prefill_chunk=8, max_queued=600)
    engine = Engine(HashTarget(VOCAB), drafting, planner, sizes)
    client = Client(engine)
    at_rest = engine.stats()
    leaving: list[tuple[int, str]] = []
    step = 0
    for n in range(500):
        client.submit(request(str(n), [n % VOCAB] * rng.randint(1, 40), rng.randint(1, 12)))
        leaving.append((step + rng.randint(0, 12), str(n)))
        if rng.random() < 0.5:
            for name in [name for when, name in leaving if when <= step]:
                engine.cancel(client.keys[name])
            leaving = [(when, name) for when, name in leaving if when > step]
            engine.step()
            step += 1
    for _, name in leaving:
        engine.cancel(client.keys[name])
    client.finish()
    engine.check_idle()
    assert drafting.sessions == set()
    now = engine.stats()
    assert (now.num_free_pages, now.num_running, now.num_waiting) == (at_rest.num_free_pages, 0, 0)
    assert dict(now.finished)["cancelled"] > 300
    for n in range(50):
        client.submit(request(f"after {n}", [n], 50))
    texts = client.finish()
    assert all(len(texts[f"after {n}"]) == 50 for n in range(50))


def test_a_pool_smaller_than_the_context_is_said_and_never_waited_for():
    """C71: with too little memory for a whole context the first long request hung."""
    engine = engine_with(num_slots=64)
    assert engine.max_context == 64
    client = Client(engine)
    with pytest.raises(ContextTooLong, match="64"):
        client.submit(request("long", [1] * 64, 5))
    client.submit(request("whole", [1] * 40, 500))
    client.submit(request("other", [2] * 40, 500))
    texts = client.finish()
    assert len(texts["whole"]) == len(texts["other"]) == 24
    assert client.last("whole").finish_reason is FinishReason.LENGTH

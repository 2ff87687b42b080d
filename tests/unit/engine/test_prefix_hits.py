"""A request that begins like an earlier one computes the rest only, and nothing else changes."""

import random
from dataclasses import replace

import pytest
import torch

from protos.exchange import Plan, PlanKind
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    PathTarget,
    RandomPlanner,
    random_source,
    request,
    small_settings,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SequenceView, SourcePlan
from verifier_service.engine.prefix_cache import PageKeys
from verifier_service.engine.static_planner import StaticPlanner

VOCAB = 31
PROMPT = [(7 * j + j * j) % VOCAB for j in range(45)]
TREE = SourcePlan("x", Plan(PlanKind.TREE, depth=3, width=3, nodes=9))


def make_engine(
    target: PathTarget | None = None, drafting: FakeDrafting | None = None, **settings: int
) -> Engine:
    planner = StaticPlanner([TREE] if drafting else [])
    return Engine(
        target or HashTarget(VOCAB), drafting or FakeDrafting(), planner, small_settings(**settings)
    )


def ask(client: Client, name: str, prompt: list[int], max_tokens: int = 12) -> tuple[int, ...]:
    client.submit(request(name, prompt, max_tokens, temperature=0.8, seed=9))
    return client.finish()[name]


def cached(client: Client, name: str) -> int:
    counts = client.last(name).counts
    assert counts is not None
    return counts.num_cached


def test_the_second_of_two_equal_requests_computes_the_last_page_only():
    target = HashTarget(VOCAB)
    client = Client(make_engine(target))
    first = ask(client, "a", PROMPT)
    before = len(target.forwards)
    assert ask(client, "b", PROMPT) == first
    assert cached(client, "a") == 0
    assert cached(client, "b") == 44
    assert target.forwards[before][0].start == 44
    assert target.forwards[before][0].num_rows == 1
    stats = client.engine.stats()
    assert (stats.num_looked_up_tokens, stats.num_cached_tokens) == (90, 44)
    client.engine.check_idle()


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token():
    client = Client(make_engine())
    texts = [ask(client, str(n), PROMPT[:16]) for n in range(2)]
    assert texts[0] == texts[1]
    assert cached(client, "1") == 12


def test_the_next_turn_of_a_conversation_finds_the_answer_too():
    client = Client(make_engine(drafting=FakeDrafting({"x": random_source(VOCAB, 3)})))
    answer = ask(client, "a", PROMPT, 20)
    turn = [*PROMPT, *answer, 5, 6, 7]
    fresh = Client(make_engine())
    assert ask(client, "b", turn) == ask(fresh, "b", turn)
    # Of 45 + 20 tokens the last one's KV was never written.
    assert cached(client, "b") == 64


def test_a_cache_that_is_off_finds_nothing():
    client = Client(make_engine(prefix_cache=False))
    assert ask(client, "a", PROMPT) == ask(client, "b", PROMPT)
    assert cached(client, "b") == 0
    assert client.engine.stats().num_cached_pages == 0


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_can_be_found_hold_committed_tokens_only(seed: int):
    target = HashTarget(VOCAB)
    drafting = FakeDrafting({"x": random_source(VOCAB, seed)})
    engine = Engine(target, drafting, RandomPlanner(seed), small_settings())
    client = Client(engine)
    for n in range(4):
        client.submit(request(str(n), PROMPT[: 9 + 7 * n], 30, temperature=0.9, seed=n))
    for name, ids in client.finish().items():
        text = [*PROMPT[: 9 + 7 * int(name)], *ids]
        pages = engine._cache.find(PageKeys(), text)
        assert len(pages) == (len(text) - 1) // 4
        slots = [page * 4 + place for page in pages for place in range(4)]
        assert target.tokens[slots].tolist() == text[: len(slots)]
        assert target.positions[slots].tolist() == list(range(len(slots)))


@pytest.mark.parametrize("num_slots", [1024, 136])
def test_drafts_change_no_hit_and_no_eviction(num_slots: int):
    rng = random.Random(1)
    prompts = [PROMPT[: rng.randint(5, 45)] + [rng.randrange(VOCAB)] * 3 for _ in range(14)]

    def hits(drafting: FakeDrafting | None) -> list[int]:
        client = Client(make_engine(drafting=drafting, num_slots=num_slots))
        for n, prompt in enumerate(prompts):
            ask(client, str(n), prompt, 17)
        evicted = client.engine.stats().num_evicted_pages
        return [evicted, *(cached(client, str(n)) for n in range(len(prompts)))]

    plain = hits(None)
    assert sum(plain[1:]) > 0
    assert (plain[0] > 0) == (num_slots == 136)
    assert hits(FakeDrafting({"x": random_source(VOCAB, 5)})) == plain


def test_a_drafter_finds_the_rows_of_cached_tokens_and_accepts_as_without():
    target = HashTarget(VOCAB)
    engines: list[Engine] = []
    seen: list[int] = []

    def from_rows(view: SequenceView, plan: Plan):
        """Drafts out of the feature rows alone: wrong rows would draft something else."""
        rows = engines[0].rows(view.key, "tap", 0, view.num_rows)
        assert rows is not None
        told = torch.frombuffer(bytearray(rows.data), dtype=torch.float32).view(-1, 2)
        assert told[:, 0].tolist() == list(view.tokens[: view.num_rows])
        assert told[:, 1].tolist() == list(range(view.num_rows))
        seen.append(view.num_rows)
        return random_source(VOCAB, int(told[:, 0].sum()))(view, plan)

    engines.append(make_engine(target, FakeDrafting({"x": from_rows})))
    client = Client(engines[0])
    texts = [ask(client, name, PROMPT, 40) for name in ("a", "b")]
    miss, hit = client.last("a").counts, client.last("b").counts
    assert miss is not None
    assert hit is not None
    assert texts[0] == texts[1]
    assert (miss.num_cached, hit.num_cached) == (0, 44)
    assert miss.num_accepted > 0
    for name in ("num_rounds", "num_draft_rounds", "num_drafted", "accepted_by_depth"):
        assert getattr(hit, name) == getattr(miss, name)


def test_equal_prompts_that_come_at_once_are_computed_once():
    target = HashTarget(VOCAB)
    client = Client(make_engine(target))
    for n in range(4):
        client.submit(request(str(n), PROMPT, 6, temperature=0.9, seed=n))
    client.submit(request("other", [1, 2, 3], 6))
    client.engine.step()
    assert [span.key for span in target.forwards[0]] == [1, 5], "who shares nothing goes first"
    client.finish()
    assert [cached(client, str(n)) for n in range(4)] == [0, 44, 44, 44]
    for n in range(4):
        alone = Client(make_engine())
        alone.submit(request(str(n), PROMPT, 6, temperature=0.9, seed=n))
        assert alone.finish()[str(n)] == client.ids(str(n))


def test_whoever_waits_for_a_page_goes_on_when_its_writer_is_cancelled():
    client = Client(make_engine())
    for n in range(2):
        client.submit(request(str(n), PROMPT, 6))
    client.engine.step()
    client.engine.cancel(client.keys["0"])
    assert len(client.finish()["1"]) == 6
    assert cached(client, "1") == 16


def test_cached_pages_go_before_anybody_is_preempted():
    client = Client(make_engine(num_slots=80))
    ask(client, "a", PROMPT, 12)
    assert client.engine.stats().num_cached_pages == 14
    other = [VOCAB - 1 - token for token in PROMPT]
    for n in range(2):
        client.submit(request(f"b{n}", other[: 20 + n], 14, seed=n))
    client.finish()
    stats = client.engine.stats()
    assert stats.num_preemptions == 0
    assert stats.num_evicted_pages > 0
    client.engine.check_idle()


def test_a_preempted_request_finds_its_own_pages():
    target = HashTarget(VOCAB)
    client = Client(make_engine(target, num_slots=96))
    for n in range(2):
        client.submit(request(str(n), PROMPT[n:40], 40, seed=n))
    client.finish()
    assert client.engine.stats().num_preemptions > 0
    assert client.engine.stats().num_cached_tokens == 0, "nothing was there when they first came"
    computed = sum(span.num_rows for spans in target.forwards for span in spans)
    num_known = sum(len(PROMPT[n:40]) + len(client.ids(str(n))) - 1 for n in range(2))
    assert num_known < computed < 2 * num_known


class BrokenOnce(HashTarget):
    """No finite score behind the first prompt that ends with token 3."""

    has_broken = False

    def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
        if path[-1] == 3 and not self.has_broken:
            self.has_broken = True
            return torch.full((VOCAB,), float("nan"))
        return super().path_logits(path)


def test_pages_of_a_request_on_which_the_target_broke_are_not_found_again():
    client = Client(make_engine(BrokenOnce(VOCAB)))
    prompt = [*[token for token in PROMPT if token != 3], 3]
    client.submit(request("a", prompt, 5))
    client.finish()
    assert client.last("a").error
    assert client.engine.stats().num_cached_pages == 0
    assert len(ask(client, "b", prompt, 5)) > 0
    assert cached(client, "b") == 0


def test_a_request_that_wants_its_prompts_logits_computes_the_whole_prompt():
    client = Client(make_engine())
    ask(client, "a", PROMPT)
    given = request("b", PROMPT, 4, temperature=0.8, seed=9)
    client.submit(replace(given, num_logprobs=1, num_prompt_logprobs=1))
    client.finish()
    assert cached(client, "b") == 0
    prompt = [entry for run in client.runs["b"] for entry in run.prompt_logprobs]
    assert len(prompt) == len(PROMPT) - 1
    client.engine.check_idle()

"""Pages, sessions and counters balance after any interleaving of submit, cancel, step, preempt."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.exchange import Plan, PlanKind
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    RandomPlanner,
    random_source,
    request,
    small_settings,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner

VOCAB = 23
PLAN = SourcePlan("x", Plan(PlanKind.TREE, depth=3, width=3, nodes=9))

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30)),
        st.tuples(st.just("go on"), st.integers(0, 11), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
    ),
    max_size=30,
)

MONOTONIC = (
    "num_requests",
    "num_steps",
    "num_rounds",
    "num_drafted",
    "num_accepted",
    "num_output_tokens",
    "num_preemptions",
    "num_looked_up_tokens",
    "num_cached_tokens",
    "num_evicted_pages",
)


def alone(name: str, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    engine = Engine(HashTarget(VOCAB), FakeDrafting(), StaticPlanner(), small_settings())
    client = Client(engine)
    client.submit(request(name, prompt, max_tokens, temperature=0.9, seed=len(prompt)))
    return client.finish()[name]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    acts=ACTS,
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**16),
    prefix_cache=st.sampled_from([True, True, False]),
)
def test_everything_balances_after_any_interleaving(
    acts, page_size: int, seed: int, prefix_cache: bool
):
    """Prompts share beginnings and go on from earlier texts, so that pages are found, shared by
    requests that run at once, and evicted."""
    drafting = FakeDrafting({"x": random_source(VOCAB, seed)}, lag=seed % 2 == 0)
    engine = Engine(
        HashTarget(VOCAB),
        drafting,
        RandomPlanner(seed) if seed % 3 else StaticPlanner([PLAN]),
        small_settings(
            page_size=page_size,
            num_slots=96,
            max_running=4,
            max_prefill_chunk=9,
            max_prefill_while_decoding=5,
            prefix_cache=prefix_cache,
        ),
    )
    client = Client(engine)
    asked: dict[str, tuple[list[int], int]] = {}
    before = engine.stats()
    for act, first, second in acts:
        if act == "submit":
            name, prompt = str(len(asked)), [(seed + j * first) % VOCAB for j in range(first)]
            asked[name] = (prompt, second)
            client.submit(request(name, prompt, second, temperature=0.9, seed=len(prompt)))
        elif act == "go on" and str(first) in asked:
            earlier = [*asked[str(first)][0], *client.ids(str(first))]
            name, prompt = str(len(asked)), [*earlier[:60], seed % VOCAB]
            asked[name] = (prompt, second)
            client.submit(request(name, prompt, second, temperature=0.9, seed=len(prompt)))
        elif act == "cancel":
            engine.cancel(client.keys.get(str(first), first))
        else:
            for _ in range(first):
                engine.step()
        if act != "submit":
            engine.check_balance()
        now = engine.stats()
        assert all(getattr(now, name) >= getattr(before, name) for name in MONOTONIC)
        before = now
    texts = client.finish()
    engine.check_idle()
    assert drafting.sessions == set()
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_cached_tokens <= stats.num_looked_up_tokens
    assert prefix_cache or stats.num_cached_pages == stats.num_cached_tokens == 0
    assert sum(count for _, count in stats.finished) == len(asked)
    for name, (prompt, max_tokens) in asked.items():
        whole = alone(name, prompt, max_tokens)
        assert texts[name] == whole[: len(texts[name])]
        if client.last(name).finish_reason != "cancelled":
            assert texts[name] == whole

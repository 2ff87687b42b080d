"""What the engine tells of its steps is what it did: texts, counts and times add up."""

import random
import time
from dataclasses import replace

import pytest
import torch
from trace_house import VOCAB, ListSink, run_traced

from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest, Speculation, SpeculationMode
from protos.grammar import Grammar, GrammarKind
from protos.options import LogitOptions
from protos.params import Acceptance
from protos.sparse import SparseQ
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    RandomPlanner,
    future_source,
    random_source,
    request,
    small_settings,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Draft, SourceInfo, SourcePlan
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.planning.costs import VerifyCosts, default_table
from verifier_service.planning.planner import AdaptivePlanner
from verifier_service.trace.records import Chunk, Closed, Header, Opened, Preempted, Record, Round
from verifier_service.trace.story import Story
from verifier_service.trace.tracer import Tracer, settings_of

EVERYTHING = [
    SourcePlan("future", Plan(PlanKind.TREE, depth=4, width=3, nodes=9)),
    SourcePlan("liar", Plan(PlanKind.CHAIN, depth=3)),
]


def some_requests() -> list[GenerationRequest]:
    return [
        request(f"r{n}", [(5 * n + 3 * j) % VOCAB for j in range(4 + 9 * n)], 30, seed=n,
                temperature=0.9 * (n % 2), ignore_eos=n != 1)
        for n in range(5)
    ]  # fmt: skip


def tracer(share: float = 1.0) -> tuple[ListSink, Tracer]:
    sink = ListSink()
    return sink, Tracer(sink, time.perf_counter, share)


def drafting_for(texts: dict[str, tuple[int, ...]], **options: object) -> FakeDrafting:
    whole = {r.request_id: (*r.prompt_ids, *texts[r.request_id]) for r in some_requests()}
    sources = {"future": future_source(whole, VOCAB, 0.3), "liar": random_source(VOCAB)}
    return FakeDrafting(sources, **options)


def of(records: list[Record], request_id: str) -> list[Record]:
    return [record for record in records if record.request_id == request_id]


def rounds_of(records: list[Record], request_id: str) -> list[Round]:
    return [r for r in of(records, request_id) if isinstance(r, Round)]


@pytest.fixture(scope="module")
def truth() -> dict[str, tuple[int, ...]]:
    return run_traced(None, some_requests()).texts()


@pytest.mark.parametrize("planner", ["static", "random", "adaptive"])
def test_rounds_give_the_text_and_the_counts_of_the_reply(truth, planner):
    planners = {
        "static": lambda: StaticPlanner(EVERYTHING),
        "random": lambda: RandomPlanner(3),
        "adaptive": lambda: AdaptivePlanner(VerifyCosts(default_table())),
    }
    sink, traced = tracer()
    client = run_traced(traced, some_requests(), drafting_for(truth), planners[planner]())
    assert client.texts() == truth
    for name, text in truth.items():
        own = of(sink.records, name)
        rounds = rounds_of(sink.records, name)
        assert isinstance(own[0], Opened)
        assert isinstance(own[-1], Closed)
        assert tuple(token for part in rounds for token in part.ids) == text
        counts = client.last(name).counts
        assert own[-1].counts == counts
        assert [part.number for part in rounds] == list(range(1, counts.num_rounds + 1))
        assert sum(part.tree.num_nodes for part in rounds) == counts.num_drafted
        assert sum(len(part.nodes) for part in rounds) == counts.num_accepted
        accepted = [names for part in rounds for n in part.nodes for names in part.sources[n - 1]]
        assert {s: accepted.count(s) for s in set(accepted)} == dict(counts.accepted_by_source)
        decoding = [part.step for part in rounds if not part.is_prompt]
        waited = pytest.approx(counts.draft_wait_s, abs=1e-9)
        assert sum(step.wait_s for step in decoding) == waited
        verified = sum(step.forward_s + step.choose_s for step in decoding)
        assert verified == pytest.approx(counts.verify_s, abs=1e-9)


def test_a_round_is_a_walk_through_its_tree_from_a_known_prefix(truth):
    sink, traced = tracer()
    run_traced(traced, some_requests(), drafting_for(truth), StaticPlanner(EVERYTHING))
    prompts = {r.request_id: r.prompt_ids for r in some_requests()}
    num_asked = 0
    for name, prompt in prompts.items():
        known = len(prompt)
        for part in rounds_of(sink.records, name):
            assert part.base_len == known
            assert part.start + part.num_rows == known
            assert part.nodes == part.tree.follow(part.choices)
            assert part.num_committed <= len(part.choices) == len(part.nodes) + 1
            assert len(part.sources) == part.tree.num_nodes
            num_asked += len(part.asked)
            known += part.num_committed
    assert num_asked > 50


def test_every_computed_token_of_a_prompt_is_told_once(truth):
    sink, traced = tracer()
    run_traced(traced, some_requests(), settings=small_settings(prefix_cache=False))
    for one in some_requests():
        own = [r for r in of(sink.records, one.request_id) if isinstance(r, Chunk | Round)]
        rows = [row for r in own for row in range(r.start, r.start + r.num_rows)]
        assert rows == list(range(len(rows)))
        assert len(rows) == len(one.prompt_ids) + len(truth[one.request_id]) - 1


def test_the_parts_of_a_step_are_no_more_than_the_step(truth):
    sink, traced = tracer()
    run_traced(traced, some_requests(), drafting_for(truth), StaticPlanner(EVERYTHING))
    steps = {r.step.number: r.step for r in sink.records if isinstance(r, Chunk | Round)}
    assert list(steps) == list(range(1, len(steps) + 1))
    for step in steps.values():
        assert 0.0 < step.forward_s + step.choose_s + step.wait_s <= step.step_s + 1e-9
        assert step.num_requests <= 5
    ends = [step.at_s for step in steps.values()]
    assert ends == sorted(ends)


def test_the_planner_says_why():
    sink, traced = tracer()
    planner = AdaptivePlanner(VerifyCosts(default_table()))
    text = run_traced(None, [request("one", range(3, 20), 120, ignore_eos=True)]).texts()["one"]
    futures = {"one": (*range(3, 20), *text)}
    drafting = FakeDrafting({"future": future_source(futures, VOCAB)})
    run_traced(traced, [request("one", range(3, 20), 120, ignore_eos=True)], drafting, planner)
    steps = [part.step for part in rounds_of(sink.records, "one") if not part.is_prompt]
    assert any(step.why for step in steps)
    assert all(step.plain_s > 0.0 and step.predicted_s > 0.0 for step in steps)


def test_a_preemption_is_told_and_what_is_computed_again():
    settings = small_settings(num_slots=64, prefix_cache=False, max_running=4)
    requests = [request(f"p{n}", range(n, n + 8), 24, ignore_eos=True) for n in range(4)]
    sink, traced = tracer()
    client = run_traced(traced, requests, settings=settings)
    assert client.engine.stats().num_preemptions > 0
    told = [r for r in sink.records if isinstance(r, Preempted)]
    assert len(told) == client.engine.stats().num_preemptions
    for one in requests:
        rounds = rounds_of(sink.records, one.request_id)
        assert tuple(t for part in rounds for t in part.ids) == client.ids(one.request_id)
    again = [r for r in sink.records if isinstance(r, Chunk) and r.start == 0]
    assert len(again) + sum(r.is_prompt and r.start == 0 for r in sink.records
                            if isinstance(r, Round)) > len(requests)  # fmt: skip


def test_cancelled_failed_and_resumed_requests_close():
    sink, traced = tracer()
    target = HashTarget(VOCAB)
    engine = Engine(target, FakeDrafting(), StaticPlanner(), small_settings(), tracer=traced)
    client = Client(engine)
    client.submit(request("done", [1, 2], 3, output=[4, 5, 6]))
    client.submit(request("resumed", [1, 2], 9, output=[4]))
    client.submit(request("cancelled", [1, 2, 3], 99))
    client.submit(request("failed", [1, 2, 4], 99))
    for _ in range(3):
        engine.step()
    engine.cancel(client.keys["cancelled"])
    engine.step()
    engine.fail_all("the target is gone")
    engine.close()
    closed = {r.request_id: r for r in sink.records if isinstance(r, Closed)}
    assert {name: r.reason for name, r in closed.items()} == {
        "done": "length",
        "resumed": "error",
        "cancelled": "cancelled",
        "failed": "error",
    }
    assert closed["failed"].error == "the target is gone"
    opened = {r.request_id: r for r in sink.records if isinstance(r, Opened)}
    assert (opened["resumed"].num_prompt, opened["resumed"].num_output) == (2, 1)
    resumed = rounds_of(sink.records, "resumed")
    assert tuple(t for part in resumed for t in part.ids) == client.ids("resumed")
    assert resumed[0].base_len == 3
    assert sink.is_closed


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_requests_their_traces_are_whole(seed):
    rng = random.Random(seed)
    sink, traced = tracer()
    drafting = FakeDrafting({"liar": random_source(VOCAB, seed)}, lag=bool(seed % 2), fail_every=7)
    settings = small_settings(num_slots=96, max_running=4, max_tokens_per_step=24)
    target = HashTarget(VOCAB, eos_token_ids=(11,))
    engine = Engine(target, drafting, RandomPlanner(seed), settings, tracer=traced)
    client = Client(engine)
    for n in range(14):
        output = [n] * rng.randrange(3)
        client.submit(request(f"r{n}", range(n, n + rng.randint(1, 30)), 20, output, seed=n))
        for _ in range(rng.randrange(6)):
            engine.step()
        if rng.random() < 0.4:
            engine.cancel(client.keys[f"r{rng.randrange(n + 1)}"])
    client.finish()
    engine.check_idle()
    assert {r.reason for r in sink.records if isinstance(r, Closed)} >= {"length", "cancelled"}
    assert any(isinstance(r, Preempted) for r in sink.records)
    for name in client.runs:
        first, *parts, last = of(sink.records, name)
        assert isinstance(first, Opened)
        assert isinstance(last, Closed)
        assert not any(isinstance(part, Opened | Closed) for part in parts)
        assert last.counts == client.last(name).counts
        rounds = [part for part in parts if isinstance(part, Round)]
        assert tuple(token for part in rounds for token in part.ids) == client.ids(name)
        assert [part.number for part in rounds] == list(range(1, last.counts.num_rounds + 1))


def test_a_round_that_broke_is_told_and_not_counted():
    class Broken(HashTarget):
        def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
            logits = super().path_logits(path)
            return torch.full_like(logits, torch.nan) if len(path) > 6 else logits

    sink, traced = tracer()
    engine = Engine(Broken(VOCAB), FakeDrafting(), StaticPlanner(), small_settings(), tracer=traced)
    client = Client(engine)
    client.submit(request("r", [1, 2, 3, 4], 9, temperature=1.0))
    client.finish()
    opened, *rounds, closed = sink.records
    assert [part.num_committed for part in rounds] == [1, 1, 1, 0]
    assert (closed.reason, closed.counts.num_rounds) == ("error", 3)
    header = Header("w", "t", "d", "f", 0.0, 0.0)
    assert Story(header, "r", opened, tuple(rounds), closed).num_missing == 0


def test_records_of_an_idle_engine_do_not_wait_for_the_next_step():
    sink, traced = tracer()
    engine = Engine(HashTarget(VOCAB), FakeDrafting(), StaticPlanner(), small_settings(),
                    tracer=traced)  # fmt: skip
    client = Client(engine)
    client.submit(request("gone", [1, 2], 9))
    engine.cancel(client.keys["gone"])
    assert not engine.step()
    assert [type(r) for r in sink.records] == [Opened, Closed]


def test_a_share_of_the_requests_is_traced_and_the_same_by_every_verifier(truth):
    requests = [request(f"cmpl-{n:08x}-0", [n % 90, 3], 2) for n in range(300)]
    found = []
    for _ in range(2):
        sink, traced = tracer(share=0.25)
        run_traced(traced, requests, settings=small_settings(max_queued=400))
        found.append({record.request_id for record in sink.records})
        assert all(isinstance(of(sink.records, i)[-1], Closed) for i in found[-1])
    assert found[0] == found[1]
    assert 40 < len(found[0]) < 110


def test_rejection_is_traced_like_anything_else():
    class Sampler(FakeDrafting):
        def sources(self) -> list[SourceInfo]:
            return [
                replace(info, capabilities=replace(info.capabilities, gives_q=True))
                for info in super().sources()
            ]

    def with_q(draft: Draft) -> Draft:
        q = tuple(SparseQ((token, (token + 1) % VOCAB), (0.9, 0.1)) for token in draft.tree.tokens)
        return replace(draft, q=q)

    sink, traced = tracer()
    drafting = Sampler({"sampler": random_source(VOCAB)}, alter=with_q)
    rejection = {"temperature": 1.0, "acceptance": Acceptance.REJECTION, "ignore_eos": True}
    one = request("r", [1, 2, 3], 20, **rejection)
    client = run_traced(traced, [one], drafting, StaticPlanner())
    rounds = rounds_of(sink.records, "r")
    assert tuple(t for part in rounds for t in part.ids) == client.ids("r")
    assert any(part.tree.num_nodes for part in rounds)
    opened = next(r for r in sink.records if isinstance(r, Opened))
    assert dict(opened.settings)["acceptance"] == "rejection"


def test_settings_hold_what_differs_and_no_token_of_the_prompt():
    fixed = Speculation(SpeculationMode.FIXED, ("ngram", "eagle3"))
    one = request("r", [90, 91], 7, speculation=fixed, top_p=0.9, stop_token_ids=tuple(range(20)))
    assert settings_of(one) == (
        ("temperature", "0"),
        ("top_p", "0.9"),
        ("seed", "0"),
        ("max_tokens", "7"),
        ("stop_token_ids", "20 entries"),
        ("drafters", "ngram+eagle3"),
    )
    options = LogitOptions(grammar=Grammar(GrammarKind.REGEX, "(yes|no) secret"))
    asked = replace(request("r", [1], 7), options=options)
    assert dict(settings_of(asked))["grammar"] == "regex of 15 characters"

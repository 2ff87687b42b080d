"""Advisers and callers misbehave; the text, the pages and the other requests do not notice."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from protos.errors import ContextTooLong, InvalidRequest, Overloaded
from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason, GenerationRequest
from protos.params import SamplingParams
from protos.tree import CandidateTree, chain
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
from verifier_service.engine.ports import Draft, SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.static_planner import StaticPlanner

VOCAB = 97


def ask(source: str, depth: int = 4) -> StaticPlanner:
    return StaticPlanner([SourcePlan(source, Plan(PlanKind.CHAIN, depth=depth))])


def engine_with(drafting: FakeDrafting | None = None, **settings: int) -> Engine:
    target = HashTarget(VOCAB, max_context=200)
    return Engine(target, drafting or FakeDrafting(), ask("x"), small_settings(**settings))


def text_alone(given: GenerationRequest) -> tuple[int, ...]:
    client = Client(engine_with())
    client.submit(given)
    return client.finish()[given.request_id]


@pytest.mark.parametrize(
    "alter",
    [
        lambda d: replace(d, tree=chain([VOCAB])),
        lambda d: replace(d, tree=chain([3, 2**31])),
        lambda d: replace(d, tree=CandidateTree((-1,), (0,), (0.0,))),
        lambda d: replace(d, base_len=d.base_len - 1),
        lambda d: replace(d, base_len=d.base_len + 1),
    ],
    ids=["id too large", "id far too large", "negative id", "older prefix", "newer prefix"],
)
def test_unusable_drafts_are_dropped_and_counted(alter):
    given = request("a", [1, 2, 3], 20)
    engine = engine_with(FakeDrafting({"x": random_source(VOCAB)}, alter=alter))
    client = Client(engine)
    client.submit(given)
    assert client.finish()["a"] == text_alone(given)
    stats = engine.stats()
    assert stats.num_dropped_drafts >= 18
    assert stats.num_drafted == 0


def test_drafts_for_requests_nobody_knows_are_dropped():
    class Confused(FakeDrafting):
        def exchange(self, asks, deadline_s):
            found = super().exchange(asks, deadline_s)
            return {key + 1000: drafts for key, drafts in found.items()}

    given = request("a", [1, 2, 3], 10)
    engine = engine_with(Confused({"x": random_source(VOCAB)}))
    client = Client(engine)
    client.submit(given)
    assert client.finish()["a"] == text_alone(given)
    assert engine.stats().num_drafted == 0


def test_a_failing_exchange_costs_drafts_and_nothing_else():
    given = request("a", [1, 2, 3], 30)
    drafting = FakeDrafting({"x": random_source(VOCAB)}, fail_every=2)
    engine = engine_with(drafting)
    client = Client(engine)
    client.submit(given)
    assert client.finish()["a"] == text_alone(given)
    assert engine.stats().num_failed_exchanges >= 10
    assert engine.stats().num_drafted > 0
    assert drafting.sessions == set()


def test_every_step_commits_for_every_scheduled_request():
    drafting = FakeDrafting({"x": random_source(VOCAB)}, lag=True, fail_every=3)
    engine = engine_with(drafting)
    client = Client(engine)
    for n in range(4):
        client.submit(request(str(n), [n], 30))
    for step in range(1, 30):
        engine.step()
        assert all(len(client.ids(str(n))) >= step for n in range(4))


@pytest.mark.parametrize(
    ("given", "error", "param"),
    [
        (GenerationRequest("a", (), SamplingParams()), InvalidRequest, "prompt"),
        (request("a", [VOCAB]), InvalidRequest, "prompt"),
        (request("a", [1, -1]), InvalidRequest, "prompt"),
        (request("a", [1], output=[VOCAB + 3]), InvalidRequest, "output_ids"),
        (request("a", [1] * 200), ContextTooLong, "prompt"),
        (request("a", [1] * 190, output=[1] * 11), ContextTooLong, "output_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(given, error, param):
    engine = engine_with()
    client = Client(engine)
    with pytest.raises(error) as caught:
        client.submit(given)
    assert caught.value.param == param
    assert client.runs["a"] == []
    assert not engine.step()


@pytest.mark.parametrize("short", range(6))
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_prompt_just_under_the_limit_is_filled_up_to_it(short: int, has_drafts: bool):
    prompt = [(3 * j) % VOCAB for j in range(200 - short - 1)]
    given = request("a", prompt, max_tokens=500, temperature=0.9, seed=2)
    future = {"a": (*prompt, *text_alone(given))}
    drafting = FakeDrafting({"x": future_source(future, VOCAB)} if has_drafts else {})
    client = Client(engine_with(drafting))
    client.submit(given)
    client.finish()
    assert len(client.ids("a")) == short + 1
    assert client.ids("a") == text_alone(given)
    assert client.last("a").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_exactly_max_tokens_are_committed_inside_accepted_runs(max_tokens: int):
    whole = request("a", [5, 6], 40)
    future = {"a": (5, 6, *text_alone(whole))}
    client = Client(engine_with(FakeDrafting({"x": future_source(future, VOCAB)})))
    client.submit(request("a", [5, 6], max_tokens))
    assert client.finish()["a"] == text_alone(whole)[:max_tokens]
    last = client.last("a")
    assert last.finish_reason is FinishReason.LENGTH
    assert last.counts is not None
    assert last.counts.num_output == max_tokens
    assert last.num_accepted <= len(last.ids)


@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("is_callers", [False, True])
def test_an_end_placed_anywhere_in_a_run_ends_it_there(place: int, is_callers: bool):
    base = text_alone(request("a", [5, 6], 40))
    end = base[place]
    first = base.index(end)
    target = HashTarget(VOCAB, eos_token_ids=() if is_callers else (end,))
    drafting = FakeDrafting({"x": future_source({"a": (5, 6, *base)}, VOCAB)})
    client = Client(Engine(target, drafting, ask("x", 8), small_settings()))
    client.submit(request("a", [5, 6], 40, stop_token_ids=(end,) if is_callers else ()))
    assert client.finish()["a"] == base[: first + 1]
    assert client.last("a").finish_reason is FinishReason.STOP
    assert client.last("a").stop_token_id == end


def test_a_full_queue_refuses_and_room_comes_back():
    engine = engine_with(max_running=2, max_queued=3)
    client = Client(engine)
    for n in range(5):
        client.submit(request(str(n), [n], 5))
    with pytest.raises(Overloaded):
        client.submit(request("late", [1]))
    client.finish()
    client.submit(request("again", [1], 5))
    assert len(client.finish()["again"]) == 5


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_a_cancelled_request_leaves_within_a_step(steps: int):
    drafting = FakeDrafting({"x": random_source(VOCAB)})
    engine = engine_with(drafting, max_running=2)
    client = Client(engine)
    for n in range(4):
        client.submit(request(str(n), [n] * 20, 30))
    for _ in range(steps):
        engine.step()
    for name in ("0", "3"):
        engine.cancel(client.keys[name])
    engine.step()
    for name in ("0", "3"):
        assert client.last(name).finish_reason is FinishReason.CANCELLED
    kept = client.finish()
    for n in (1, 2):
        assert kept[str(n)] == text_alone(request(str(n), [n] * 20, 30))
    engine.check_idle()
    assert drafting.sessions == set()


def test_late_double_and_unknown_cancels_do_nothing():
    engine = engine_with()
    client = Client(engine)
    client.submit(request("a", [1], 3))
    client.finish()
    for key in (client.keys["a"], client.keys["a"], 12345, -1):
        engine.cancel(key)
    assert not engine.step()
    assert len(client.runs["a"]) == 3
    assert client.last("a").finish_reason is FinishReason.LENGTH


def test_scores_that_are_not_finite_end_only_their_request():
    class Broken(HashTarget):
        def path_logits(self, path):
            logits = super().path_logits(path)
            return torch.full_like(logits, torch.nan) if 42 in path else logits

    engine = Engine(Broken(VOCAB), FakeDrafting(), StaticPlanner(), small_settings())
    client = Client(engine)
    client.submit(request("bad", [42, 1], 10))
    client.submit(request("good", [1], 10))
    client.finish()
    assert client.last("bad").finish_reason is FinishReason.ERROR
    assert client.last("bad").error
    good = text_alone(request("good", [1], 10))
    upto = good.index(42) + 1 if 42 in good else 10
    assert client.ids("good") == good[:upto]
    engine.check_idle()


def test_a_request_that_arrives_finished_is_answered_at_once():
    engine = engine_with()
    client = Client(engine)
    client.submit(request("a", [1], 2, output=[4, 5]))
    engine.step()
    assert client.last("a").finish_reason is FinishReason.LENGTH
    assert client.ids("a") == ()
    engine.check_idle()


def test_counts_of_a_request_add_up():
    whole = request("a", list(range(30)), 40)
    future = {"a": (*range(30), *text_alone(whole))}
    drafting = FakeDrafting({"x": future_source(future, VOCAB, 0.2)})
    planner = RandomPlanner(3)
    engine = Engine(HashTarget(VOCAB), drafting, planner, small_settings())
    client = Client(engine)
    client.submit(whole)
    client.finish()
    runs, counts = client.runs["a"], client.last("a").counts
    assert counts is not None
    assert counts.num_prompt == 30
    assert counts.num_output == 40 == sum(len(run.ids) for run in runs)
    assert counts.num_rounds == len(runs)
    assert counts.num_accepted == sum(counts.accepted_by_depth)
    assert counts.num_accepted == sum(outcome.num_accepted for outcome in planner.outcomes)
    assert counts.num_drafted == sum(outcome.tree.num_nodes for outcome in planner.outcomes)
    assert dict(counts.accepted_by_source) == {"x": counts.num_accepted}
    assert [run.counts.num_output for run in runs if run.counts] == sorted(
        run.counts.num_output for run in runs if run.counts
    )
    assert planner.forgotten == [client.keys["a"]]


@dataclass
class RowWatch(FakeDrafting):
    """Reads all rows of every view it is shown."""

    read_rows: PagedRows | None = None
    seen: list[tuple[int, bool]] = field(default_factory=list)

    def exchange(self, asks, deadline_s):
        assert self.read_rows is not None
        for view in (ask.view for ask in asks):
            self.seen.append((view.num_rows, view.decoding))
            if view.num_rows:
                rows = self.read_rows(view.key, "tap", 0, view.num_rows)
                held = np.frombuffer(rows.data, dtype="<f4").reshape(rows.count, rows.width)
                assert held[:, 0].tolist() == list(view.tokens[: view.num_rows])
                assert held[:, 1].tolist() == list(range(view.num_rows))
            assert self.read_rows(view.key, "tap", 0, view.num_rows + 1) is None
            assert self.read_rows(view.key + 9, "tap", 0, 1) is None
        return super().exchange(asks, deadline_s)


def test_rows_are_offered_while_the_prompt_is_computed():
    drafting = RowWatch()
    engine = engine_with(drafting, max_prefill_chunk=8)
    drafting.read_rows = engine.rows
    client = Client(engine)
    client.submit(request("a", range(20), 3))
    client.finish()
    assert drafting.seen == [(0, False), (8, False), (16, False), (20, True), (21, True)]
    assert all(not ask.plans for asks in drafting.asked for ask in asks if not ask.view.decoding)


def test_rows_follow_the_accepted_path_of_a_tree():
    whole = request("a", [1, 2, 3], 60)
    texts = {"a": (1, 2, 3, *text_alone(whole))}
    drafting = RowWatch({"x": future_source(texts, VOCAB, 0.3)})
    plan = StaticPlanner([SourcePlan("x", Plan(PlanKind.TREE, depth=5, width=3, nodes=15))])
    target = HashTarget(VOCAB)
    rows = PagedRows(target)
    drafting.read_rows = rows
    client = Client(Engine(target, drafting, plan, small_settings(page_size=1), rows))
    client.submit(whole)
    client.finish()
    assert len(drafting.seen) < 40


def test_drafts_are_late_but_usable_when_their_path_was_followed():
    whole = request("a", [1, 2], 40)
    future = {"a": (1, 2, *text_alone(whole))}
    drafting = FakeDrafting({"x": future_source(future, VOCAB)}, lag=True)
    kept: list[Draft] = []
    drafting.alter = lambda draft: kept.append(draft) or draft
    client = Client(engine_with(drafting))
    client.submit(whole)
    assert client.finish()["a"] == text_alone(whole)
    assert all(draft.was_late for draft in kept)
    assert sum(draft.tree.num_nodes for draft in kept) > 10

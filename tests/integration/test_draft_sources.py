"""Which sources a request is drafted by: overrides, limits, missing rows, several at once."""

import pytest

from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from protos.generation import GenerationRequest, Speculation, SpeculationMode
from tests.integration.exchange_house import (
    CHAIN,
    CONTEXT,
    TREE,
    VOCAB,
    ask,
    oracle,
    plain_texts,
    until,
)
from tests.integration.fake_drafter import FakeDrafter, Mode
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.settings import EngineSettings

REQUESTS = [ask("a", 5), ask("b", 70, temperature=0.9, seed=3), ask("c", 600)]


@pytest.fixture(scope="module")
def truth():
    return plain_texts(REQUESTS)


@pytest.fixture
def remote():
    drafter = FakeDrafter(oracle(), VOCAB).start()
    yield drafter
    drafter.stop()


def ngram(**limits):
    return build_drafter(DrafterSettings(kind="ngram", limits=DrafterLimits(**limits)))


def with_override(request, **speculation):
    return GenerationRequest(
        request.request_id,
        request.prompt_ids,
        request.params,
        speculation=Speculation(**speculation),
    )


def test_two_sources_draft_side_by_side_in_one_round(build, remote, truth):
    house = build([SourcePlan("ngram", CHAIN), SourcePlan("fake", TREE)])
    house.exchange.add_local(ngram())
    house.offer("fake", remote.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    counts = house.exchange.counts()
    assert counts["ngram"].in_time == counts["ngram"].asked > 0
    assert counts["fake"].in_time == counts["fake"].asked > 0
    by_source = dict(house.client.last("a").counts.accepted_by_source)
    assert by_source["fake"] > 0


def test_open_sessions_are_counted_over_all_sources_and_none_is_left(build, remote):
    house = build([SourcePlan("ngram", CHAIN), SourcePlan("fake", TREE)])
    house.exchange.add_local(ngram())
    house.offer("fake", remote.address)
    house.client.submit(with_override(REQUESTS[0], mode=SpeculationMode.OFF))
    for request in REQUESTS[1:]:
        house.client.submit(request)
    assert house.engine.stats().num_draft_sessions == 0
    house.engine.step()
    house.engine.step()
    assert house.engine.stats().num_draft_sessions == 4, "two requests at two sources each"
    house.engine.cancel(house.client.keys["c"])
    house.engine.step()
    assert house.engine.stats().num_draft_sessions == 2
    house.exchange.set_replicas("fake", [])
    house.engine.step()
    assert house.engine.stats().num_draft_sessions == 1, "who is not offered any more keeps none"
    house.client.finish()
    assert house.engine.stats().num_draft_sessions == 0


def test_a_local_drafter_answers_without_any_wait(build, truth):
    house = build([SourcePlan("ngram", CHAIN)], deadline_s=0.0)
    house.exchange.add_local(ngram())
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    counts = house.exchange.counts()["ngram"]
    assert counts.in_time == counts.asked > 0


def test_a_request_without_speculation_opens_no_session(build, remote, truth):
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", remote.address)
    house.client.submit(with_override(REQUESTS[2], mode=SpeculationMode.OFF))
    house.client.finish()
    assert house.client.texts()["c"] == truth["c"]
    assert remote.num_works == 0


def test_a_request_that_names_its_drafters_goes_to_no_other(build, remote, truth):
    house = build([])
    house.exchange.add_local(ngram())
    house.offer("fake", remote.address)
    house.client.submit(
        with_override(REQUESTS[2], mode=SpeculationMode.FIXED, drafters=("ngram",), plan=CHAIN)
    )
    house.client.finish()
    assert house.client.texts()["c"] == truth["c"]
    assert house.exchange.counts()["ngram"].asked > 0
    assert remote.num_works == 0


def test_a_prompt_is_told_to_drafters_while_it_is_still_computed(build, remote):
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", remote.address)
    house.client.submit(ask("long", 1500))
    house.engine.step()
    until(lambda: remote.sessions)
    (session,) = remote.sessions.values()
    until(lambda: len(session.tokens) == 1500)
    assert house.client.runs["long"] == []


def test_a_request_past_the_drafters_context_goes_on_without_it(build, truth):
    house = build([SourcePlan("ngram", CHAIN)])
    house.exchange.add_local(ngram(max_context=80))
    house.client.submit(REQUESTS[1])
    house.client.finish()
    assert house.client.texts()["b"] == truth["b"]
    asked = house.exchange.counts()["ngram"].asked
    assert 0 < asked <= 10
    assert house.exchange.counts()["ngram"].refused == 0


def test_missing_rows_cost_the_source_and_nothing_else(build, truth):
    drafter = FakeDrafter(
        oracle(), VOCAB, capabilities={"raw_width": 2, "digest": "digest"}
    ).start()
    house = build([SourcePlan("fake", CHAIN)], read_rows=lambda *_: None)
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    assert house.exchange.counts()["fake"].rows_missing == len(REQUESTS)
    until(lambda: not drafter.sessions)
    drafter.stop()


def test_a_full_drafter_serves_whom_it_has_room_for(build, truth):
    drafter = FakeDrafter(oracle(), VOCAB, capabilities={"max_sessions": 1}).start()
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    house.engine.step()
    assert len(drafter.sessions) <= 1
    assert house.client.finish() == truth
    assert drafter.num_opens >= 2, "the next request took the place that fell free"
    drafter.stop()


@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, float("nan"), float("inf"), 1e9])
def test_no_deadline_holds_a_step_for_ever(build, remote, truth, deadline_s):
    sizes = EngineSettings(num_slots=CONTEXT, max_draft_wait_s=0.3)
    house = build([SourcePlan("fake", CHAIN)], deadline_s=deadline_s, settings=sizes)
    house.offer("fake", remote.address)
    remote.mode = Mode.SILENT
    house.client.submit(REQUESTS[0])
    house.client.finish()
    assert house.client.texts()["a"] == truth["a"]

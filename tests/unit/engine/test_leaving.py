"""Whoever is cancelled, or whose time is over, leaves within two steps, wherever it stands."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from protos.errors import DeadlineExceeded, InvalidRequest
from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason, GenerationRequest
from protos.options import LogitOptions
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    random_source,
    request,
    small_settings,
)
from tests.tiny import EOS_ID
from tests.unit.grammar import grammar_cases
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.service import EngineService
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars

VOCAB = 97
TREE = SourcePlan("x", Plan(PlanKind.TREE, depth=3, width=3, nodes=9))
HOUR_S = 3600.0


class House:
    """An engine whose clock a test turns, with one request "a" to be ended in a given phase."""

    def __init__(self, **settings: int) -> None:
        self.now_s = 100.0
        self.drafting = FakeDrafting({"x": random_source(VOCAB)})
        self.engine = Engine(
            HashTarget(VOCAB),
            self.drafting,
            StaticPlanner([TREE]),
            small_settings(**settings),
            clock=lambda: self.now_s,
        )
        self.client = Client(self.engine)
        self.asked: dict[str, GenerationRequest] = {}

    def submit(self, name: str, num_prompt: int, max_tokens: int = 40) -> None:
        prompt = [(ord(name) + 3 * j) % VOCAB for j in range(num_prompt)]
        given = request(name, prompt, max_tokens, temperature=0.8, seed=5)
        self.asked[name] = replace(given, timeout_s=HOUR_S if name == "a" else None)
        self.client.submit(self.asked[name])

    def stands(self) -> tuple[bool, bool, bool]:
        """Whether "a" has pages, whether it is running, whether it has output."""
        key = self.client.keys["a"]
        running = [one for one in self.engine._scheduler.running if one.key == key]
        return bool(self.engine._pool.pages_of(key)), bool(running), bool(self.client.ids("a"))


def alone(given: GenerationRequest) -> tuple[int, ...]:
    house = House()
    house.client.submit(replace(given, timeout_s=None))
    return house.client.finish()[given.request_id]


def not_drained() -> House:
    house = House()
    house.submit("b", 9)
    house.engine.step()
    house.submit("a", 9)
    return house


def waiting() -> House:
    house = House(max_running=1)
    house.submit("b", 9)
    house.submit("a", 9)
    house.engine.step()
    assert house.stands() == (False, False, False)
    return house


def prefilling() -> House:
    house = House(max_prefill_chunk=4)
    house.submit("b", 4)
    house.submit("a", 60)
    house.engine.step()
    house.engine.step()
    assert house.stands() == (True, True, False)
    return house


def decoding() -> House:
    house = House()
    house.submit("b", 9)
    house.submit("a", 9)
    for _ in range(4):
        house.engine.step()
    assert house.stands() == (True, True, True)
    return house


def preempted() -> House:
    house = House(num_slots=56)
    house.submit("b", 9)
    house.submit("a", 9)
    for _ in range(60):
        house.engine.step()
        if house.client.ids("a") and not house.stands()[1]:
            assert house.stands() == (False, False, True)
            return house
    raise AssertionError("the pool was never short")


PHASES = (not_drained, waiting, prefilling, decoding, preempted)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_pages_and_sessions_are_free_within_two_steps(
    phase: Callable[[], House], reason: FinishReason
):
    house = phase()
    engine, client = house.engine, house.client
    said = client.ids("a")
    if reason is FinishReason.CANCELLED:
        engine.cancel(client.keys["a"])
    else:
        house.now_s += HOUR_S
    engine.step()
    engine.step()
    assert house.stands()[:2] == (False, False)
    assert client.keys["a"] not in house.drafting.sessions
    engine.check_balance()
    last = client.last("a")
    assert last.finish_reason is reason
    assert client.ids("a") == said, "nothing is said any more"
    assert not any(run.finish_reason for run in client.runs["a"][:-1])
    assert client.finish()["b"] == alone(house.asked["b"])
    assert dict(engine.stats().finished) == {reason.value: 1, "length": 1}
    engine.check_idle()


def test_time_that_is_not_over_changes_nothing():
    house = House()
    house.submit("a", 9)
    while house.engine.step():
        house.now_s += HOUR_S / 100
    assert house.client.last("a").finish_reason is FinishReason.LENGTH
    assert house.client.ids("a") == alone(house.asked["a"])


def test_a_request_that_is_late_when_it_comes_is_answered_and_never_computed():
    house = House()
    house.submit("a", 9)
    house.now_s += HOUR_S
    assert not house.engine.step()
    assert [run.finish_reason for run in house.client.runs["a"]] == [FinishReason.DEADLINE]
    assert "3600 s" in house.client.last("a").error
    assert house.engine.stats().num_rows == 0


def test_waiting_costs_time_whatever_the_engine_did_meanwhile():
    """The time runs from the arrival on: half of it in the queue leaves half for the rest."""
    house = House(max_running=1)
    house.submit("b", 3, max_tokens=5)
    house.submit("a", 3, max_tokens=300)
    for _ in range(6):
        house.engine.step()
        house.now_s += HOUR_S / 12
    assert house.client.last("b").finish_reason is FinishReason.LENGTH
    assert house.client.last("a").finish_reason is None
    house.now_s += HOUR_S / 2
    house.engine.step()
    assert house.client.last("a").finish_reason is FinishReason.DEADLINE


def test_the_time_that_a_grammar_takes_to_compile_is_the_requests_own():
    interval = sys.getswitchinterval()
    target = HashTarget(grammar_cases.VOCAB, eos_token_ids=(EOS_ID,))
    grammars = Grammars(grammar_cases.vocabulary)
    engine = Engine(target, FakeDrafting(), StaticPlanner(), small_settings(), grammars=grammars)
    service = EngineService(engine)
    service.start()
    options = LogitOptions(grammar=grammar_cases.regex("[ab]{3}"))
    asked = replace(request("a", [5], 9), options=options, timeout_s=1e-9)

    async def late() -> None:
        with pytest.raises(DeadlineExceeded):
            await anext(service.generate(asked))
        assert service.stats().num_requests == 0
        runs = [run async for run in service.generate(replace(asked, timeout_s=HOUR_S))]
        assert runs[-1].finish_reason is FinishReason.STOP

    asyncio.run(late())
    service.stop()
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused_by_name(timeout_s: float):
    with pytest.raises(InvalidRequest) as caught:
        replace(request("a", [1]), timeout_s=timeout_s)
    assert caught.value.param == "timeout_s"

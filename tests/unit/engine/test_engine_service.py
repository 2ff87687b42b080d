"""The bridge between the engine's thread and an event loop."""

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from protos.errors import DeadlineExceeded, InvalidRequest, Overloaded, PeerUnavailable
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.grammar import Grammar, GrammarKind
from protos.options import LogitOptions
from tests.fakes import Client, FakeDrafting, HashTarget, request, small_settings
from verifier_service.engine.loop import Engine
from verifier_service.engine.service import EngineService
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars

VOCAB = 97
LIMIT_S = 60.0


def make_engine(target: HashTarget | None = None, **settings: int) -> Engine:
    return Engine(
        target or HashTarget(VOCAB, max_context=4096),
        FakeDrafting(),
        StaticPlanner(),
        small_settings(**({"num_slots": 8192} | settings)),
    )


@pytest.fixture
def service() -> Iterator[EngineService]:
    interval = sys.getswitchinterval()
    made = EngineService(make_engine())
    made.start()
    yield made
    made.stop()
    sys.setswitchinterval(interval)


async def collect(service: EngineService, given: GenerationRequest) -> list[TokenRun]:
    return [run async for run in service.generate(given)]


async def gather(stream: AsyncGenerator[TokenRun, None]) -> list[TokenRun]:
    return [run async for run in stream]


def ids(runs: list[TokenRun]) -> tuple[int, ...]:
    return tuple(token for run in runs for token in run.ids)


async def until(claim) -> None:
    """Wait until a claim holds; the test's own timeout ends the wait."""
    while not claim():
        await asyncio.sleep(0.005)


def test_streams_of_many_callers_equal_the_engine_alone(service: EngineService):
    requests = [request(str(n), [n, n + 1], 30, temperature=0.7, seed=n) for n in range(12)]
    client = Client(make_engine())
    for one in requests:
        client.submit(one)
    expected = client.finish()

    async def all_of_them():
        return await asyncio.gather(*(collect(service, one) for one in requests))

    streams = asyncio.run(all_of_them())
    assert {runs[0].request_id: ids(runs) for runs in streams} == expected
    for runs in streams:
        assert [run.finish_reason for run in runs[:-1]] == [None] * (len(runs) - 1)
        assert runs[-1].finish_reason is FinishReason.LENGTH
        assert runs[-1].counts is not None
        assert runs[-1].counts.num_output == 30


def test_leaving_a_stream_cancels_its_request(service: EngineService):
    async def leave_early():
        stream = service.generate(request("a", [1], 4000))
        async for _ in stream:
            break
        await stream.aclose()
        await until(lambda: service.stats().num_running == 0)

    asyncio.run(leave_early())
    assert dict(service.stats().finished) == {"cancelled": 1}
    assert service.stats().num_free_pages == service.stats().num_pages


def test_a_storm_of_cancelled_tasks_leaves_nothing_behind(service: EngineService):
    async def storm():
        tasks = [
            asyncio.create_task(collect(service, request(str(n), [n % VOCAB], 3000)))
            for n in range(60)
        ]
        for n, task in enumerate(tasks):
            if n % 7 == 0:
                await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: service.stats().num_running + service.stats().num_waiting == 0)
        return await collect(service, request("after", [1], 10))

    assert len(ids(asyncio.run(storm()))) == 10
    assert service.stats().num_free_pages == service.stats().num_pages


def test_refusals_come_before_the_first_run(service: EngineService):
    async def refused():
        with pytest.raises(InvalidRequest):
            await collect(service, request("a", [VOCAB]))

    asyncio.run(refused())


def test_an_engine_that_dies_ends_every_stream_with_an_error():
    target = HashTarget(VOCAB)
    service = EngineService(make_engine(target))
    interval = sys.getswitchinterval()
    service.start()

    async def scenario():
        stream = service.generate(request("a", [1], 10_000))
        await anext(stream)
        target.fail_with = RuntimeError("secret detail")
        runs = [run async for run in stream]
        with pytest.raises(PeerUnavailable):
            await collect(service, request("b", [1]))
        return runs

    runs = asyncio.run(scenario())
    assert runs[-1].finish_reason is FinishReason.ERROR
    assert "secret" not in runs[-1].error
    assert service.failure is not None
    service.stop()
    sys.setswitchinterval(interval)


def test_stopping_ends_running_streams_and_refuses_new_ones():
    interval = sys.getswitchinterval()
    service = EngineService(make_engine())
    service.start()

    async def scenario():
        stream = service.generate(request("a", [1], 100_000))
        await anext(stream)
        stopping = asyncio.get_running_loop().run_in_executor(None, service.stop)
        runs = [run async for run in stream]
        await stopping
        with pytest.raises(PeerUnavailable):
            await collect(service, request("b", [1]))
        return runs

    runs = asyncio.run(scenario())
    assert runs[-1].finish_reason is FinishReason.ERROR
    assert not [t for t in threading.enumerate() if t.name == "engine"]
    sys.setswitchinterval(interval)


class HeldGrammars(Grammars):
    """Compiling takes until `go`; what is compiled allows anything."""

    def __init__(self) -> None:
        self.is_compiling, self.go = threading.Event(), threading.Event()

    def compile(self, grammar: Grammar) -> None:
        self.is_compiling.set()
        assert self.go.wait(LIMIT_S)

    def open(self, grammar, tokens, num_prompt):
        return None


WITH_GRAMMAR = replace(
    request("a", [1]), options=LogitOptions(grammar=Grammar(GrammarKind.REGEX, "a"))
)


def started_with(grammars: Grammars, **settings: int) -> EngineService:
    target = HashTarget(VOCAB, eos_token_ids=(0,))
    drafting, planner = FakeDrafting(), StaticPlanner()
    sizes = small_settings(**settings)
    service = EngineService(Engine(target, drafting, planner, sizes, grammars=grammars))
    service.start()
    return service


def test_time_passes_while_others_compile():
    interval = sys.getswitchinterval()
    grammars = HeldGrammars()
    service = started_with(grammars)

    async def scenario() -> None:
        first = asyncio.create_task(collect(service, WITH_GRAMMAR))
        await until(grammars.is_compiling.is_set)
        with pytest.raises(DeadlineExceeded, match=r"within the 0\.01 s"):
            await collect(service, replace(WITH_GRAMMAR, timeout_s=0.01))
        grammars.go.set()
        assert (await first)[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(scenario())
    service.stop()
    sys.setswitchinterval(interval)


def test_who_waits_for_a_compiler_gets_signs_of_life_and_then_the_text():
    interval = sys.getswitchinterval()
    grammars = HeldGrammars()
    service = started_with(grammars)

    async def scenario() -> list[TokenRun]:
        async with asyncio.timeout(LIMIT_S), aclosing(service.generate(WITH_GRAMMAR, 0.01)) as all_:
            for _ in range(2):
                assert await anext(all_) == TokenRun("a", ())
            assert not grammars.go.is_set()
            grammars.go.set()
            return [run async for run in all_]

    assert len(ids(asyncio.run(scenario()))) == WITH_GRAMMAR.params.max_tokens
    service.stop()
    sys.setswitchinterval(interval)


def test_who_waits_for_a_compiler_has_a_place_of_the_queue_until_he_leaves():
    interval = sys.getswitchinterval()
    grammars = HeldGrammars()
    service = started_with(grammars, max_running=1, max_queued=2)

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            waiting = [asyncio.create_task(collect(service, WITH_GRAMMAR)) for _ in range(3)]
            await until(grammars.is_compiling.is_set)
            for late in (WITH_GRAMMAR, request("plain", [1])):
                with pytest.raises(Overloaded, match="3 requests"):
                    await collect(service, late)
            waiting[1].cancel()
            await asyncio.gather(waiting[1], return_exceptions=True)
            assert ids(await collect(service, request("plain", [1])))
            grammars.go.set()
            for one in (waiting[0], waiting[2]):
                assert (await one)[-1].finish_reason is FinishReason.LENGTH
            assert ids(await collect(service, request("again", [1])))

    asyncio.run(scenario())
    service.stop()
    sys.setswitchinterval(interval)


def test_leaving_while_a_grammar_is_compiled_gives_the_place_back():
    interval = sys.getswitchinterval()
    grammars = HeldGrammars()
    service = started_with(grammars, max_running=1, max_queued=0)

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            left = service.generate(WITH_GRAMMAR, 0.01)
            await anext(left)
            with pytest.raises(Overloaded):
                await collect(service, request("plain", [1]))
            await left.aclose()
            assert ids(await collect(service, request("plain", [1])))
            grammars.go.set()

    asyncio.run(scenario())
    service.stop()
    sys.setswitchinterval(interval)


def test_stopping_sends_who_waits_for_a_compiler_elsewhere():
    interval = sys.getswitchinterval()
    grammars = HeldGrammars()
    service = started_with(grammars)

    async def scenario() -> list[object]:
        waiting = [asyncio.create_task(collect(service, WITH_GRAMMAR)) for _ in range(3)]
        await until(grammars.is_compiling.is_set)
        await asyncio.to_thread(service.stop)
        grammars.go.set()
        waiting.append(asyncio.create_task(collect(service, WITH_GRAMMAR)))
        return await asyncio.gather(*waiting, return_exceptions=True)

    found = asyncio.run(scenario())
    assert [type(one) for one in found] == [PeerUnavailable] * 4
    sys.setswitchinterval(interval)


def test_draining_finishes_who_is_in_and_lets_nobody_else_in():
    """Running and queued requests end as without it; `stop` then has nobody to cut off."""
    interval = sys.getswitchinterval()
    requests = [request(str(n), [n], 200, temperature=0.7, seed=n) for n in range(4)]
    client = Client(make_engine())
    for one in requests:
        client.submit(one)
    expected = client.finish()
    service = EngineService(make_engine(max_running=2))
    service.start()

    async def scenario() -> list[list[TokenRun]]:
        streams = [service.generate(one) for one in requests]
        collecting = [asyncio.create_task(gather(stream)) for stream in streams]
        await until(lambda: service.stats().num_running == 2)
        draining = asyncio.create_task(service.drain(LIMIT_S))
        await until(lambda: service.refusal is not None)
        with pytest.raises(PeerUnavailable, match="shutting down"):
            await collect(service, request("late", [1]))
        assert await draining, "everybody is through"
        return await asyncio.gather(*collecting)

    found = asyncio.run(scenario())
    service.stop()
    assert {runs[0].request_id: ids(runs) for runs in found} == expected
    assert {runs[-1].finish_reason for runs in found} == {FinishReason.LENGTH}
    assert service.stats().num_requests == 4
    sys.setswitchinterval(interval)


def test_draining_is_over_when_its_time_is_and_stopping_ends_who_is_left():
    interval = sys.getswitchinterval()
    service = EngineService(make_engine())
    service.start()

    async def scenario() -> list[TokenRun]:
        stream = service.generate(request("a", [1], 100_000))
        await anext(stream)
        assert not await service.drain(0.01)
        stopping = asyncio.get_running_loop().run_in_executor(None, service.stop)
        runs = await gather(stream)
        await stopping
        return runs

    assert asyncio.run(scenario())[-1].finish_reason is FinishReason.ERROR
    sys.setswitchinterval(interval)

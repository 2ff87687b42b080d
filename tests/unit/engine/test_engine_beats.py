"""While a request waits, its stream says that the engine lives, and falls silent when it hangs."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from protos.generation import TokenRun
from tests.fakes import FakeDrafting, HashTarget, request, small_settings
from verifier_service.engine.loop import Engine
from verifier_service.engine.service import EngineService
from verifier_service.engine.static_planner import StaticPlanner

BEAT_S = 0.02


class Gated(HashTarget):
    """A target whose steps wait for a gate once it is shut."""

    def __init__(self) -> None:
        super().__init__(97, max_context=4096)
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, spans):
        self.gate.wait()
        return super().forward(spans)


@contextmanager
def running(target: HashTarget, **settings: int) -> Iterator[EngineService]:
    interval = sys.getswitchinterval()
    sizes = small_settings(**({"num_slots": 8192} | settings))
    service = EngineService(Engine(target, FakeDrafting(), StaticPlanner(), sizes))
    service.start()
    try:
        yield service
    finally:
        service.stop()
        sys.setswitchinterval(interval)


async def first(service: EngineService, name: str) -> TokenRun:
    stream = service.generate(request(name, [1], 4000), BEAT_S)
    try:
        return await anext(stream)
    finally:
        await stream.aclose()


def test_a_request_behind_a_full_engine_gets_signs_of_life():
    async def wait_behind(service: EngineService) -> TokenRun:
        ahead = service.generate(request("ahead", [1], 4000))
        await anext(ahead)
        try:
            return await first(service, "behind")
        finally:
            await ahead.aclose()

    with running(HashTarget(97, max_context=4096), max_running=1) as service:
        beat = asyncio.run(wait_behind(service))
    assert beat == TokenRun("behind", ())


def test_a_hanging_engine_gives_no_sign_of_life_and_counts_its_silence():
    target = Gated()

    async def hang(service: EngineService) -> list[TokenRun]:
        stream = service.generate(request("a", [1], 4000), BEAT_S)
        await anext(stream)
        target.gate.clear()
        # Runs of steps that were under way, then nothing.
        while service.silent_s < 5 * BEAT_S:
            await asyncio.sleep(BEAT_S)
        later = []
        try:
            async with asyncio.timeout(5 * BEAT_S):
                async for run in stream:
                    later.append(run)
        except TimeoutError:
            pass
        target.gate.set()
        await stream.aclose()
        return later

    with running(target) as service:
        later = asyncio.run(hang(service))
        assert sum(not run.ids for run in later) <= 2


def test_streams_that_do_not_ask_get_runs_with_tokens_only():
    async def collect(service: EngineService) -> list[TokenRun]:
        return [run async for run in service.generate(request("a", [1], 50))]

    with running(HashTarget(97, max_context=4096)) as service:
        assert all(run.ids for run in asyncio.run(collect(service)))

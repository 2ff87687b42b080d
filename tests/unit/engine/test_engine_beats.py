"""While a request waits, its stream says that the engine lives, and falls silent when it hangs."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from protos.generation import TokenRun
from tests.fakes import FakeDrafting, HashTarget, request, small_settings
from verifier_service.engine.loop import Engine
from verifier_service.engine.service import EngineService
from verifier_service.engine.static_planner import StaticPlanner

BEAT_S = 0.02
LIMIT_S = 60.0
NUM_STEPS = 20


class Paced(HashTarget):
    """A target whose steps take a while, so that a long request outlasts any stall of a test."""

    def __init__(self) -> None:
        super().__init__(97, max_context=4096)

    def forward(self, spans):
        time.sleep(BEAT_S / 10)
        return super().forward(spans)


class Gated(HashTarget):
    """A target that stops inside a step after the first NUM_STEPS, until its gate is opened."""

    def __init__(self) -> None:
        super().__init__(97, max_context=4096)
        self.is_stuck = threading.Event()
        self.gate = threading.Event()
        self._num_steps = 0

    def forward(self, spans):
        self._num_steps += 1
        if self._num_steps > NUM_STEPS:
            self.is_stuck.set()
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

    with running(Paced(), max_running=1) as service:
        beat = asyncio.run(wait_behind(service))
    assert beat == TokenRun("behind", ())


def test_a_hanging_engine_gives_no_sign_of_life_and_counts_its_silence():
    target = Gated()

    async def hang(service: EngineService) -> tuple[int, int]:
        """How many runs had come by the time the engine was silent, and ten beats later."""
        seen: list[TokenRun] = []

        async def collect() -> None:
            async for run in service.generate(request("a", [1], 4000), BEAT_S):
                seen.append(run)

        collecting = asyncio.create_task(collect())
        async with asyncio.timeout(LIMIT_S):
            while not target.is_stuck.is_set() or service.silent_s < 5 * BEAT_S:
                await asyncio.sleep(BEAT_S)
        # What was on its way when the engine stopped has arrived a moment later.
        await asyncio.sleep(BEAT_S)
        before = len(seen)
        await asyncio.sleep(10 * BEAT_S)
        after = len(seen)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        return before, after

    with running(target) as service:
        try:
            before, after = asyncio.run(hang(service))
        finally:
            target.gate.set()
    assert before >= NUM_STEPS
    assert after == before


def test_streams_that_do_not_ask_get_runs_with_tokens_only():
    async def collect(service: EngineService) -> list[TokenRun]:
        return [run async for run in service.generate(request("a", [1], 50))]

    with running(HashTarget(97, max_context=4096)) as service:
        assert all(run.ids for run in asyncio.run(collect(service)))

"""A call that no verifier has taken yet waits in Serve's queue and is nobody's silence.

On the loop's own clock (see `test_silent_verifier`), against a handle whose queue the test opens.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest
from ray.serve.exceptions import (
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.fleet.backend import HandleBackend, VerifierLost, VerifierSilent
from cluster.fleet.failover import Ticket
from cluster.fleet.messages import StreamItem
from protos.errors import OutriderError, PeerUnavailable
from protos.generation import GenerationRequest, TokenRun
from tests.unit.cluster.http_fakes import VOCAB
from tests.unit.cluster.serve_fakes import answering
from tests.unit.cluster.test_silent_verifier import (
    ASKED,
    SILENCE_S,
    Verifier,
    goes_on,
    hangs_after_two,
    report,
    run,
    shuts_down,
)

LONG_S = 20 * SILENCE_S
SLICE_S = SILENCE_S / 8


class Queued:
    """A call in Serve's queue. After `cancel` it raises what Serve's own raises; so does `cancel`
    itself, once the call has failed."""

    def __init__(self, queue: "Queue", request: GenerationRequest, ticket: Ticket) -> None:
        self._items = self._wait(queue, request, ticket)
        self.ticket = ticket
        self.is_cancelled = False
        self._error: RayServeException | None = None

    async def _wait(self, queue: "Queue", request: GenerationRequest, ticket: Ticket):
        name = await queue.room(ticket)
        ticket.replica_id = name
        async for item in queue.verifiers[name](request):
            yield item

    async def __anext__(self) -> StreamItem:
        try:
            return await anext(self._items)
        except RayServeException as error:
            self._error = error
            raise
        except asyncio.CancelledError:
            if self.is_cancelled:
                raise RequestCancelledError("r") from None
            raise

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._error is not None:
            raise self._error


class Queue:
    """A handle whose calls wait for room. silent: those that answer no look."""

    def __init__(self, verifiers: dict[str, Verifier]) -> None:
        self.verifiers = verifiers
        self.known = list(verifiers)
        self.silent: set[str] = set()
        self.calls: list[Queued] = []
        self.has_room: Callable[[Ticket], Coroutine[object, object, str]] | None = None

    async def room(self, ticket: Ticket) -> str:
        assert self.has_room is not None
        return await self.has_room(ticket)

    def options(self, **_options: object) -> "Queue":
        return self

    def remote(self, request: GenerationRequest, ticket: Ticket) -> Queued:
        self.calls.append(Queued(self, request, ticket))
        return self.calls[-1]

    def broadcast(self, _method: str) -> DeploymentBroadcastResponse:
        reports = [replace(report(name), vocab_size=VOCAB) for name in self.known]
        return answering([None if r.replica_id in self.silent else r for r in reports])


def after(*waits: tuple[float, str]) -> Callable[[Ticket], Coroutine[object, object, str]]:
    """Room for one call after the other: when, since it was made, and at whom."""
    left = list(waits)

    async def wait(_ticket: Ticket) -> str:
        wait_s, name = left.pop(0)
        await asyncio.sleep(wait_s)
        return name

    return wait


async def never(_ticket: Ticket) -> str:
    await asyncio.Event().wait()
    return ""


async def backend_of(queue: Queue) -> HandleBackend:
    """It looks every slice; a look takes no longer than one."""
    backend = HandleBackend(queue, SLICE_S, SLICE_S, SILENCE_S)
    await backend.start()
    return backend


@dataclass(frozen=True)
class Seen:
    """One request: its tokens or what it raised, how long it took, and what was made of it."""

    ids: list[int]
    error: Exception | None
    took_s: float
    num_failovers: object
    suspects: frozenset[str]


def seen_of(queue: Queue, scenario: Callable[[], None] = lambda: None) -> Seen:
    """One request's; `scenario` comes a slice after it began."""

    async def go() -> Seen:
        loop = asyncio.get_running_loop()
        unseen: list[object] = []
        loop.set_exception_handler(lambda _loop, what: unseen.append(what))
        backend = await backend_of(queue)
        loop.call_later(SLICE_S, scenario)
        before_s = loop.time()
        ids: list[int] = []
        error: Exception | None = None
        try:
            async with aclosing(backend.generate(ASKED)) as runs:
                async for one in runs:
                    ids.extend(one.ids)
        except OutriderError as caught:
            error = caught
        took_s = loop.time() - before_s
        suspects = backend._lookout.suspects.current()
        num_failovers = (await backend.statistics())["failovers_total"]
        await backend.close()
        gc.collect()
        assert unseen == []
        return Seen(ids, error, took_s, num_failovers, suspects)

    return run(go())


def test_a_call_waits_while_all_are_full_and_nobody_is_blamed():
    queue = Queue({"a": goes_on, "b": goes_on})
    queue.has_room = after((LONG_S, "b"))
    seen = seen_of(queue)
    assert seen == Seen([5, 6], None, pytest.approx(LONG_S), 0, frozenset())
    assert len(queue.calls) == 1


@pytest.mark.parametrize("waits_s", [0.0, 0.9 * SILENCE_S, SILENCE_S, LONG_S])
def test_silence_counts_from_when_a_verifier_has_the_call(waits_s):
    async def is_slow(request: GenerationRequest):
        await asyncio.sleep(0.9 * SILENCE_S)
        async for item in goes_on(request):
            yield item

    queue = Queue({"a": is_slow, "b": goes_on})
    queue.has_room = after((waits_s, "a"))
    seen = seen_of(queue)
    assert seen == Seen([5, 6], None, pytest.approx(waits_s + 0.9 * SILENCE_S), 0, frozenset())


@pytest.mark.parametrize("waits_s", [0.0, 0.9 * SILENCE_S, LONG_S])
def test_a_verifier_that_took_a_call_and_hangs_is_lost_after_its_silence(waits_s):
    async def hangs(_request: GenerationRequest):
        queue.silent.add("a")
        await asyncio.Event().wait()
        yield TokenRun("never", ())

    queue = Queue({"a": hangs})
    queue.has_room = after((waits_s, "a"))
    seen = seen_of(queue)
    assert isinstance(seen.error, VerifierSilent)
    assert seen.suspects == {"a"}
    # Who has it is seen once a slice.
    assert 0.99 * SILENCE_S <= seen.took_s - waits_s <= SILENCE_S + 2.01 * SLICE_S


def test_where_there_is_no_verifier_at_all_the_call_ends():
    queue = Queue({"a": goes_on, "b": goes_on})
    queue.has_room = never
    seen = seen_of(queue, lambda: queue.silent.update("ab"))
    assert isinstance(seen.error, PeerUnavailable)
    assert not isinstance(seen.error, VerifierLost)
    assert str(seen.error) == "no verifier is running; try again"
    assert 0.99 * SILENCE_S <= seen.took_s <= 2 * SILENCE_S
    assert queue.calls[0].is_cancelled
    assert len(queue.calls) == 1


def test_a_verifier_that_was_lost_is_nobody_to_wait_for():
    queue = Queue({"a": shuts_down, "b": goes_on})

    async def room(_ticket: Ticket) -> str:
        return "a" if len(queue.calls) == 1 else await never(_ticket)

    queue.has_room = room
    seen = seen_of(queue, lambda: queue.known.remove("b"))
    assert str(seen.error) == "no other verifier is running; try again"
    assert [sorted(call.ticket.lost) for call in queue.calls] == [[], ["a"]]


def test_a_request_that_lost_its_verifier_waits_for_another_with_room():
    queue = Queue({"a": hangs_after_two, "b": goes_on})
    queue.has_room = after((0.0, "a"), (LONG_S, "b"))
    seen = seen_of(queue, lambda: queue.silent.add("a"))
    assert seen == Seen([5, 6, 7, 8], None, pytest.approx(LONG_S + SILENCE_S), 1, {"a"})
    assert queue.calls[1].ticket.lost == {"a"}


def test_a_call_that_waits_hears_who_looks_dead_by_now():
    queue = Queue({"a": goes_on, "b": goes_on})
    seen: list[frozenset[str]] = []

    async def room(ticket: Ticket) -> str:
        for _ in range(16):
            seen.append(ticket.preferred("ab"))
            await asyncio.sleep(SILENCE_S / 8)
        queue.silent.clear()
        queue.silent.add("b")
        while ticket.preferred("ab") != {"a"}:
            await asyncio.sleep(SILENCE_S / 8)
        return "a"

    queue.has_room = room
    queue.silent.add("a")

    async def go() -> list[int]:
        backend = HandleBackend(queue, SLICE_S, SLICE_S, SILENCE_S)
        backend._lookout.reports = (report("a"), report("b"))
        await backend.start()
        try:
            async with aclosing(backend.generate(ASKED)) as runs:
                return [token async for one in runs for token in one.ids]
        finally:
            await backend.close()

    assert run(go()) == [5, 6]
    assert seen[0] == frozenset("ab")
    assert seen[-1] == {"b"}


def test_closing_a_request_that_waits_takes_it_out_of_the_queue():
    queue = Queue({"a": goes_on})
    queue.has_room = never

    async def go() -> list[object]:
        loop = asyncio.get_running_loop()
        unseen: list[object] = []
        loop.set_exception_handler(lambda _loop, what: unseen.append(what))
        backend = await backend_of(queue)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(LONG_S), aclosing(backend.generate(ASKED)) as runs:
                await anext(runs)
        assert queue.calls[0].is_cancelled
        await asyncio.sleep(SLICE_S)
        await backend.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return unseen

    assert run(go()) == []

"""A verifier that hangs is given up within a set time, and another one goes on with the request.

The event loop's clock stands still while anything runs and jumps to the next timer when nothing
does, so that no stall of the machine looks like silence.
"""

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.fleet.backend import HandleBackend, VerifierSilent
from cluster.fleet.failover import Ticket
from cluster.fleet.lookout import SILENT_LOOKS
from cluster.fleet.messages import SourceReport, StreamItem, VerifierReport
from protos.errors import Overloaded, PeerUnavailable
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.params import SamplingParams
from tests.unit.cluster.serve_fakes import answering

Result = TypeVar("Result")

SILENCE_S = 0.05
ASKED = GenerationRequest("r", (1, 2), SamplingParams(max_tokens=8))


class Jumps(selectors.DefaultSelector):
    """Passes the time that it is asked to wait at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(None if timeout is None else 0.0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop on the time that `Jumps` has passed."""

    def __init__(self) -> None:
        self._jumps = Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s


def run(scenario: Coroutine[object, object, Result]) -> Result:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(scenario)


def report(name: str, silent_s: float = 0.0) -> VerifierReport:
    sources = (SourceReport("ngram", 0, True),)
    return VerifierReport(name, 1, 64, 100, "f", True, sources, {}, silent_s)


Verifier = Callable[[GenerationRequest], AsyncIterator[StreamItem]]


class Response:
    """One call of a verifier's `generate`."""

    def __init__(self, items: AsyncIterator[StreamItem]) -> None:
        self._items = items
        self.is_cancelled = False

    async def __anext__(self) -> StreamItem:
        return await anext(self._items)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A handle whose calls go to these verifiers, one after the other, under reported names.

    silent: names of those that answer no look.
    """

    def __init__(self, verifiers: list[Verifier], reports: list[VerifierReport]) -> None:
        self._verifiers = verifiers
        self.reports = reports
        self.silent: frozenset[str] = frozenset()
        self.responses: list[Response] = []
        self.asked: list[GenerationRequest] = []

    def options(self, **_options: object) -> "Handle":
        return self

    def remote(self, request: GenerationRequest, ticket: Ticket) -> Response:
        names = [report.replica_id for report in self.reports]
        ticket.replica_id = next(name for name in names if name in ticket.preferred(names))
        self.asked.append(request)
        self.responses.append(Response(self._verifiers.pop(0)(request)))
        return self.responses[-1]

    def broadcast(self, _method: str) -> DeploymentBroadcastResponse:
        return answering([None if r.replica_id in self.silent else r for r in self.reports])


async def hangs_after_two(request: GenerationRequest) -> AsyncIterator[StreamItem]:
    yield TokenRun(request.request_id, (5,))
    yield TokenRun(request.request_id, (6,))
    await asyncio.Event().wait()


async def goes_on(request: GenerationRequest) -> AsyncIterator[StreamItem]:
    last = 5 + len(request.output_ids)
    yield TokenRun(request.request_id, (last,))
    yield TokenRun(request.request_id, (last + 1,), finish_reason=FinishReason.LENGTH)


async def talks(request: GenerationRequest) -> AsyncIterator[StreamItem]:
    while True:
        yield TokenRun(request.request_id, (1,))


async def waits_long(request: GenerationRequest) -> AsyncIterator[StreamItem]:
    """Longer than SILENCE_S, with signs of life."""
    for _ in range(12):
        await asyncio.sleep(SILENCE_S / 4)
        yield TokenRun(request.request_id, ())
    async for item in goes_on(request):
        yield item


def runs_of(handle: Handle) -> list[TokenRun]:
    async def collect() -> list[TokenRun]:
        backend = HandleBackend(handle, 1.0, 1.0, SILENCE_S)
        await backend.start()
        try:
            async with aclosing(backend.generate(ASKED)) as runs:
                return [run async for run in runs]
        finally:
            await backend.close()

    return run(collect())


def test_another_verifier_goes_on_after_the_tokens_of_one_that_hangs():
    handle = Handle([hangs_after_two, goes_on], [report("a"), report("b")])
    runs = runs_of(handle)
    assert [token for run in runs for token in run.ids] == [5, 6, 7, 8]
    assert [bool(run.finish_reason) for run in runs] == [False, False, False, True]
    assert handle.responses[0].is_cancelled
    assert handle.asked[1].output_ids == (5, 6)


async def shuts_down(_request: GenerationRequest) -> AsyncIterator[StreamItem]:
    yield PeerUnavailable("the verifier is shutting down")


def test_another_verifier_takes_what_one_that_shuts_down_refuses():
    handle = Handle([shuts_down, goes_on], [report("a"), report("b")])
    assert [token for one in runs_of(handle) for token in one.ids] == [5, 6]
    with pytest.raises(PeerUnavailable, match="shutting down"):
        runs_of(Handle([shuts_down], [report("a")]))


async def is_full(_request: GenerationRequest) -> AsyncIterator[StreamItem]:
    yield Overloaded("9 requests are running or queued already", 4.0)


def test_a_full_verifier_is_an_error_with_its_time_to_come_back():
    handle = Handle([is_full], [report("a"), report("b")])
    with pytest.raises(Overloaded) as caught:
        runs_of(handle)
    assert caught.value.retry_after_s == 4.0


def test_a_verifier_that_hangs_alone_is_an_error_that_may_be_tried_again():
    handle = Handle([hangs_after_two], [report("a")])

    async def lost() -> None:
        backend = HandleBackend(handle, 1.0, 1.0, SILENCE_S)
        await backend.start()
        # By the time it is missed, it says that it makes no steps.
        handle.reports = [report("a", silent_s=2 * SILENCE_S)]
        try:
            async with aclosing(backend.generate(ASKED)) as runs:
                async for _ in runs:
                    pass
        finally:
            await backend.close()

    with pytest.raises(VerifierSilent, match=r"no sign of life for 0\.05 s; try again"):
        run(lost())
    assert handle.responses[0].is_cancelled


def test_waiting_with_signs_of_life_is_no_silence_and_gives_no_empty_runs():
    runs = runs_of(Handle([waits_long], [report("a")]))
    assert [run.ids for run in runs] == [(5,), (6,)]


def test_verifiers_that_make_no_steps_are_not_counted_on():
    handle = Handle([], [report("a", silent_s=1.0), report("b")])

    async def count() -> object:
        backend = HandleBackend(handle, 1.0, 1.0, SILENCE_S)
        await backend.start()
        await backend.close()
        return (await backend.statistics())["verifier_replicas"]

    assert run(count()) == 1


@pytest.mark.parametrize(
    ("names", "silent", "left"), [("ab", "a", 1), ("ab", "ab", 0), ("a", "a", 0)]
)
def test_silence_counts_after_several_looks_and_for_one_verifier_only(names, silent, left):
    async def count() -> list[object]:
        backend = HandleBackend(handle, 1.0, 1.0, SILENCE_S)
        await backend.start()
        handle.silent = frozenset(silent)
        looks = [(await backend.statistics())["verifier_replicas"] for _ in range(SILENT_LOOKS)]
        handle.silent = frozenset()
        looks.append((await backend.statistics())["verifier_replicas"])
        await backend.close()
        return looks

    handle = Handle([], [report(name) for name in names])
    known = len(names)
    assert run(count()) == [known] * (SILENT_LOOKS - 1) + [left, known]


def test_runs_of_a_verifier_alone_speak_for_it_while_looks_fail():
    async def served() -> list[int]:
        backend = HandleBackend(handle, 1.0, 1.0, SILENCE_S)
        await backend.start()
        handle.silent = frozenset("a")
        counts = []
        async with aclosing(backend.generate(ASKED)) as runs:
            await anext(runs)
            for _ in range(SILENT_LOOKS):
                await anext(runs)
                counts.append((await backend.statistics())["verifier_replicas"])
        for _ in range(SILENT_LOOKS):
            counts.append((await backend.statistics())["verifier_replicas"])
        await backend.close()
        return counts

    handle = Handle([talks], [report("a")])
    assert run(served()) == [1] * (2 * SILENT_LOOKS - 1) + [0]


def test_all_requests_of_a_verifier_that_hangs_go_on_elsewhere():
    async def all_of(count: int) -> list[list[int]]:
        backend = HandleBackend(handle, 1.0, 1.0, SILENCE_S)
        await backend.start()
        handle.silent = frozenset("a")

        async def one() -> list[int]:
            async with aclosing(backend.generate(ASKED)) as runs:
                return [token async for run in runs for token in run.ids]

        try:
            return await asyncio.gather(*(one() for _ in range(count)))
        finally:
            await backend.close()

    count = 2 * SILENT_LOOKS
    handle = Handle([hangs_after_two] * count + [goes_on] * count, [report("a"), report("b")])
    assert run(all_of(count)) == [[5, 6, 7, 8]] * count

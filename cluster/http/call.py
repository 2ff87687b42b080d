"""One HTTP call's generations: several answers run side by side, one stream of deltas comes out.

Invariant: after `aclose`, or the end of `deltas`, every generation is closed and `ended` was
called once. Closing twice is harmless.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.http.answers import Answer, Delta, Tally
from cluster.http.waiting import end_all, within
from protos.errors import PeerUnavailable
from protos.generation import TokenRun

Runs = AsyncGenerator[TokenRun, None]


class Call:
    """The answers of one call and the generations that feed them."""

    def __init__(
        self,
        answers: Sequence[Answer],
        runs: Sequence[Runs],
        ended: Callable[[], None],
        timeout_s: float | None = None,
    ) -> None:
        """timeout_s: all answers together may take so long; None: any time."""
        self._answers = answers
        parts = [_answer(a, r) for a, r in zip(answers, runs, strict=True)]
        self._deltas = within(parts[0] if len(parts) == 1 else _merge(parts), timeout_s)
        self._first: Delta | None = None
        self._ended: Callable[[], None] | None = ended

    async def start(self) -> None:
        """Wait for the first delta, so that refusals come before any event.

        Raises: what the generation raised; the call is then closed.
        """
        async with AsyncExitStack() as unstarted:
            unstarted.push_async_callback(self.aclose)
            self._first = await anext(self._deltas)
            unstarted.pop_all()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """All deltas, of all answers as they come. Raises what a generation raised."""
        try:
            if self._first is not None:
                yield self._first
            async for delta in self._deltas:
                yield delta
        finally:
            await self.aclose()

    def tally(self) -> Tally:
        """Delivered counts of all answers together."""
        total = Tally()
        for answer in self._answers:
            total.add(answer.tally)
        return total

    async def collect(self) -> list[list[Delta]]:
        """All deltas by answer, when all are there. Raises what a generation raised."""
        found: list[list[Delta]] = [[] for _ in self._answers]
        async with aclosing(self.deltas()) as stream:
            async for delta in stream:
                found[delta.index].append(delta)
        return found

    async def aclose(self) -> None:
        """Give everything back."""
        ended, self._ended = self._ended, None
        try:
            await self._deltas.aclose()
        finally:
            if ended is not None:
                ended()


async def _answer(answer: Answer, runs: Runs) -> AsyncGenerator[Delta, None]:
    """Deltas of one answer; its generation is closed at a text-level end."""
    async with aclosing(runs):
        async for run in runs:
            yield answer.feed(run)
            if answer.done:
                return
    raise PeerUnavailable("the verifier ended the answer without a reason")


async def _merge(parts: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Deltas of several generators in the order they come; the first error ends all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=4 * len(parts))

    async def pump(part: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(part):
                async for delta in part:
                    await queue.put(delta)
            await queue.put(None)
        except Exception as error:  # handed to the consumer, who raises it
            await queue.put(error)

    tasks = [asyncio.create_task(pump(part)) for part in parts]
    try:
        num_running = len(parts)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await end_all(tasks)


class EventStream(StreamingResponse):
    """Server-sent events that close their call however sending ends."""

    def __init__(self, events: AsyncGenerator[bytes, None], call: Call) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until done, disconnected or cancelled."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                await self._call.aclose()

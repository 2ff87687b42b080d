"""How long an answer is waited for: until its deadline, and while its client is there.

Knows no tokens. Invariant: whatever ends the wait, what was waited for is closed or cancelled
before the error comes out, so that nothing goes on computing for nobody.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from protos.errors import DeadlineExceeded

_T = TypeVar("_T")


async def within(
    items: AsyncGenerator[_T, None], timeout_s: float | None
) -> AsyncGenerator[_T, None]:
    """The same items, for timeout_s from the first request for one; None: for ever.

    Raises: DeadlineExceeded.
    """
    until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    async with aclosing(items):
        while True:
            try:
                async with asyncio.timeout_at(until):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except (TimeoutError, DeadlineExceeded) as error:
                if timeout_s is None:
                    raise
                # Whoever noticed first: the time that was allowed is what the caller is told.
                raise DeadlineExceeded(
                    f"the answer was not finished within timeout_s, {timeout_s:g} s"
                ) from error
            yield item


async def while_connected(request: Request, work: Coroutine[object, object, _T]) -> _T:
    """What `work` returns. Its body was read; a client that leaves meanwhile cancels the work.

    The work may be done when this raises: a result that wants closing stays the caller's to close.
    Raises: ClientDisconnect, and what `work` raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all([working, leaving])
    # Both may be done: the word that the client left has been read, nobody will hear it again.
    if not leaving.cancelled():
        raise ClientDisconnect
    return working.result()


async def end_all(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel the tasks and wait until all have ended, however often the waiter is cancelled."""
    for task in tasks:
        task.cancel()
    again: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            again = error
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if again is not None:
        raise again


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

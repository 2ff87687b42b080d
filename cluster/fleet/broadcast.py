"""Asks every running replica of a deployment, each on its own: one that hangs spoils no answer.

Knows nothing of what is asked. Invariant: an answer that came in time is never thrown away.

Serve's `broadcast` asks all at once, but its `results_async` has all answers or, when one replica
stays silent, none. So this takes the calls themselves, by a private name of Ray 2.60:
`_fetch_replica_results_async`, one call for each replica that Serve names.
"""

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answers:
    """What replicas answered; those that failed to are left out.

    is_whole: nobody was silent, so whoever did not answer is gone or has failed.
    """

    values: tuple[object, ...]
    is_whole: bool


async def ask_each(
    handle: Any,  # noqa: ANN401
    method: str,
    timeout_s: float,
) -> Answers:
    """Call `method` of all replicas and wait for each of them for at most timeout_s.

    handle: Serve's, of the deployment. Raises: TimeoutError when Serve does not say who runs,
    RayError and RayServeException, such as DeploymentUnavailableError when nobody does.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    async with asyncio.timeout_at(until_s):
        calls = await handle.broadcast(method)._fetch_replica_results_async()
    asked = {asyncio.ensure_future(call.get_async()): call for call in calls}
    if not asked:
        return Answers((), is_whole=True)
    try:
        await asyncio.wait(asked, timeout=until_s - loop.time())
    finally:
        silent = [task for task in asked if not task.done()]
        for task in silent:
            task.cancel()
            asked[task].cancel()
    answered = [task for task in asked if not (task in silent or task.cancelled())]
    # All are asked for their exception: asyncio would report those that nobody has seen.
    values = tuple([task.result() for task in answered if task.exception() is None])
    return Answers(values, is_whole=not silent)

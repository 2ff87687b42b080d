"""Serve's side of a broadcast: its own response, around replicas that answer what a test says."""

import asyncio
from collections.abc import Sequence

from ray.serve.handle import DeploymentBroadcastResponse


class ReplicaCall:
    """One replica's call: it gives the answer, raises it, or hangs when it is None."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.is_cancelled = False

    async def get_async(self) -> object:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def cancel(self) -> None:
        self.is_cancelled = True


def broadcast(calls: Sequence[ReplicaCall] | Exception | None) -> DeploymentBroadcastResponse:
    """What `handle.broadcast` gives: these calls; an error, or silence, of Serve itself."""

    async def send() -> list[ReplicaCall]:
        if calls is None:
            await asyncio.Event().wait()
        if isinstance(calls, Exception):
            raise calls
        return list(calls)

    return DeploymentBroadcastResponse(send(), asyncio.get_running_loop())


def answering(answers: Sequence[object] | Exception) -> DeploymentBroadcastResponse:
    """The same, by answers: a replica whose answer is None hangs."""
    if isinstance(answers, Exception):
        return broadcast(answers)
    return broadcast([ReplicaCall(answer) for answer in answers])

"""Where verifiers have no room: what a client is told at the HTTP door, and when."""

import asyncio
from pathlib import Path

import pytest
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster.fleet.backend import HandleBackend
from cluster.fleet.failover import Ticket
from protos.errors import Overloaded, PeerUnavailable
from protos.generation import FinishReason, GenerationRequest, TokenRun
from tests.unit.cluster.http_fakes import client_of
from tests.unit.cluster.test_silent_verifier import goes_on
from tests.unit.cluster.test_waiting_calls import Queue, after, never


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (BackPressureError(9, 9, 503, 7.0), Overloaded, "all verifiers are full"),
        (BackPressureError(9, 9), Overloaded, "all verifiers are full"),
        (
            DeploymentUnavailableError.__new__(DeploymentUnavailableError),
            PeerUnavailable,
            "no verifier is running; try again",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_queue_that_is_full_is_told_at_the_door_and_tried_nowhere_else(
    tmp_path: Path, error, kind, told, stream
):
    queue = Queue({"a": goes_on, "b": goes_on})

    async def room(_ticket: Ticket) -> str:
        raise error

    queue.has_room = room

    async def go():
        backend = HandleBackend(queue, 60.0, 1.0)
        await backend.start()
        try:
            async with client_of(backend, tmp_path) as client:
                return await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        finally:
            await backend.close()

    reply = asyncio.run(go())
    assert reply.status_code == 503
    code = "overloaded" if kind is Overloaded else "unavailable"
    assert reply.json()["error"]["code"] == code
    assert reply.json()["error"]["message"] == told
    retry_after_s = getattr(error, "retry_after_s", None) if kind is Overloaded else None
    assert reply.headers["retry-after"] == str(int(retry_after_s or 1))
    assert len(queue.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_waits_ends_at_the_requests_own_deadline(tmp_path: Path, stream):
    queue = Queue({"a": goes_on})
    queue.has_room = never

    async def go():
        backend = HandleBackend(queue, 60.0, 1.0, 0.05)
        await backend.start()
        try:
            async with client_of(backend, tmp_path) as client:
                body = {"prompt": "x", "timeout_s": 0.3, "stream": stream}
                return await client.post("/v1/completions", json=body)
        finally:
            await backend.close()

    reply = asyncio.run(go())
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    assert queue.calls[0].is_cancelled


def test_a_request_is_whole_after_a_wait(tmp_path: Path):
    async def says(request: GenerationRequest):
        yield TokenRun(request.request_id, (72,), finish_reason=FinishReason.LENGTH)

    queue = Queue({"a": says})
    queue.has_room = after((0.2, "a"))

    async def go():
        backend = HandleBackend(queue, 60.0, 1.0, 0.05)
        await backend.start()
        try:
            async with client_of(backend, tmp_path) as client:
                return await client.post("/v1/completions", json={"prompt": "x"})
        finally:
            await backend.close()

    reply = asyncio.run(go())
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["finish_reason"] == "length"

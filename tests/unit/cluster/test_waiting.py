"""Nobody computes for a client that left, or past the time that was allowed."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from starlette.types import Message

from cluster.http.ingress import Front, FrontSettings
from cluster.http.limits import Limits
from cluster.http.text import load_text
from protos.generation import GenerationRequest, TokenRun
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, client_of, posting, runs_of


class EndlessBackend(FakeBackend):
    """One token, then nothing for ever; `first` False: not even that."""

    def __init__(self, first: bool = True) -> None:
        super().__init__(lambda request: [])
        self._first = first
        self.is_waiting = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenRun, None]:
        self.num_open += 1
        try:
            if self._first:
                yield TokenRun(request.request_id, (70,))
            self.is_waiting.set()
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


async def leave(directory: Path, backend: EndlessBackend, body: dict[str, object]) -> list[Message]:
    """Post `body` and disconnect once the backend waits; what was sent until then."""
    byte_tokenizer(VOCAB).save_pretrained(directory)
    app = Front(backend, load_text(directory), FrontSettings(("tiny",))).app()
    sent: list[Message] = []
    scope, message = posting("/v1/completions", body)
    incoming = [message]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await backend.is_waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), 20)
    return sent


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_client_that_leaves_ends_its_generations(tmp_path: Path, stream: bool, first: bool):
    async def go() -> None:
        backend = EndlessBackend(first)
        body = {"prompt": ["a", "b"], "stream": stream, "max_tokens": 5}
        sent = await leave(tmp_path, backend, body)
        assert backend.num_open == 0
        if not (stream and first):
            assert sent[0]["status"] == 499

    asyncio.run(go())


@pytest.mark.parametrize("by_whom", ["request", "operator"])
def test_an_answer_past_its_deadline_ends_with_an_error_that_says_so(tmp_path: Path, by_whom: str):
    async def go() -> None:
        backend = EndlessBackend()
        limits = Limits(timeout_s=0.05 if by_whom == "operator" else 30.0)
        settings = FrontSettings(("tiny",), limits=limits)
        body = {"prompt": "a", "timeout_s": 0.05 if by_whom == "request" else 30.0}
        async with client_of(backend, tmp_path, settings) as client:
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 504
            assert reply.json()["error"]["code"] == "deadline_exceeded"
            assert "0.05 s" in reply.json()["error"]["message"]
            assert backend.num_open == 0
            streamed = await client.post("/v1/completions", json=body | {"stream": True})
            events = streamed.text.strip().split("\n\n")
            assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
            assert events[-1] == "data: [DONE]"
            assert backend.num_open == 0
            metrics = await client.get("/metrics")
            assert 'finished_reason="abort"} 2' in metrics.text

    asyncio.run(go())


@pytest.mark.parametrize("wrong", [0, -1, "soon", True])
def test_a_deadline_that_is_no_time_is_refused(tmp_path: Path, wrong: object):
    async def go() -> None:
        backend = EndlessBackend()
        async with client_of(backend, tmp_path) as client:
            body = {"prompt": "a", "timeout_s": wrong}
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "timeout_s"

    asyncio.run(go())


def test_an_answer_in_time_is_not_touched_by_its_deadline(tmp_path: Path):
    async def go() -> None:
        backend = FakeBackend(lambda request: runs_of(request, [70, 71, 72]))
        async with client_of(backend, tmp_path) as client:
            body = {"prompt": "a", "timeout_s": 60, "return_token_ids": True}
            reply = await client.post("/v1/completions", json=body)
            assert reply.json()["choices"][0]["token_ids"] == [70, 71, 72]

    asyncio.run(go())


def test_a_full_house_refuses_with_503_and_says_when_to_come_back(tmp_path: Path):
    async def go() -> None:
        backend = EndlessBackend()
        limits = Limits(max_requests=2, retry_after_s=7.0)
        async with client_of(backend, tmp_path, FrontSettings(("tiny",), limits=limits)) as client:
            ask = {"prompt": ["a", "b"]}
            running = asyncio.create_task(client.post("/v1/completions", json=ask))
            await backend.is_waiting.wait()
            reply = await client.post("/v1/completions", json={"prompt": "c"})
            assert (reply.status_code, reply.headers["Retry-After"]) == (503, "7")
            assert reply.json()["error"]["type"] == "overloaded_error"
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            again = await client.post("/v1/completions", json={"prompt": "c", "timeout_s": 0.01})
            assert again.status_code == 504, "the places were given back"

    asyncio.run(go())

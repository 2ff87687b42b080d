"""The client: events read from any cut of lines, errors mapped, retries before the first token."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cluster.http.ingress import Front, FrontSettings
from cluster.http.text import load_text
from cluster.tools.calls import (
    Chunk,
    EventReader,
    Retries,
    Usage,
    error_of,
    read_events,
    statistics_of,
)
from cluster.tools.chat import summary
from cluster.tools.client import AsyncOutriderClient, OutriderClient
from protos.errors import (
    ContextTooLong,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PeerUnavailable,
    ProtocolError,
    Unauthenticated,
    UnknownModel,
)
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, runs_of

AT_ONCE = Retries(most=2, first_wait_s=0.0)


def error_body(code: str | None = None, param: str | None = None) -> dict:
    return {"error": {"message": "why", "type": "t", "param": param, "code": code}}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, error_body(param="top_p"), InvalidRequest),
        (400, error_body("context_length_exceeded", "prompt"), ContextTooLong),
        (401, error_body("invalid_api_key"), Unauthenticated),
        (404, error_body("model_not_found", "model"), UnknownModel),
        (404, {}, InvalidRequest),
        (413, error_body(), InvalidRequest),
        (429, error_body(), Overloaded),
        (503, error_body("overloaded"), Overloaded),
        (500, {"error": "flat"}, PeerUnavailable),
        (502, {}, PeerUnavailable),
    ],
)
def test_statuses_become_our_errors(status: int, body: dict, expected: type) -> None:
    error = error_of(status, body, "3")
    assert type(error) is expected
    if isinstance(error, InvalidRequest) and status == 400:
        assert error.param == body["error"]["param"]
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 3.0


def test_events_survive_comments_and_split_data() -> None:
    lines = [": hello", "", 'data: {"a":', "data: 1}", "", "", "event: x", "data:[DONE]", ""]
    assert list(read_events(lines)) == [{"a": 1}]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['data: {"a": 1}', ""], PeerUnavailable),
        (["data: [DONE]", "", "data: {}", ""], ProtocolError),
        (["data: nonsense", ""], ProtocolError),
        (["data: [1]", ""], ProtocolError),
        ([f"data: {json.dumps(error_body())}", ""], PeerUnavailable),
    ],
)
def test_broken_streams_are_errors(lines: list[str], expected: type) -> None:
    with pytest.raises(expected):
        list(read_events(lines))


def test_reader_takes_an_end_once() -> None:
    reader = EventReader()
    assert reader.feed("data: [DONE]") is None
    assert reader.feed("") is None
    reader.close()


def served(tmp_path: Path, backend: FakeBackend) -> httpx.ASGITransport:
    byte_tokenizer(VOCAB).save_pretrained(tmp_path)
    app = Front(backend, load_text(tmp_path), FrontSettings(("tiny",))).app()
    return httpx.ASGITransport(app=app, raise_app_exceptions=False)


def test_async_client_chats_streams_and_reads_statistics(tmp_path: Path) -> None:
    backend = FakeBackend(lambda r: runs_of(r, [70, 71, 72, 73], 2, 3))

    async def go() -> None:
        transport = served(tmp_path, backend)
        async with AsyncOutriderClient("http://test", transport=transport) as client:
            whole = await client.chat("hi", temperature=0.0, seed=3, return_token_ids=True)
            assert whole.token_ids == (70, 71, 72, 73)
            assert (whole.usage.num_output, whole.usage.num_accepted) == (4, 2)
            assert whole.usage.num_rejected == 4
            override = {"mode": "eagle3", "depth": 2}
            chunks = [c async for c in client.stream("hi", seed=3, speculation=override)]
            assert "".join(c.text for c in chunks) == whole.text
            assert chunks[-1].usage.num_accepted == whole.usage.num_accepted
            assert backend.requests[1].speculation.drafters == ("eagle3",)
            with pytest.raises(InvalidRequest) as caught:
                await client.complete("hi", top_p=2.0)
            assert caught.value.param == "top_p"
            totals = await client.statistics()
            assert totals['vllm:generation_tokens_total{model_name="tiny"}'] == 8

    asyncio.run(go())


def sync_client(handler: Callable[[httpx.Request], httpx.Response]) -> OutriderClient:
    transport = httpx.MockTransport(handler)
    return OutriderClient("http://test", "key", retries=AT_ONCE, transport=transport)


def event_lines(*events: object, end: str = "data: [DONE]\n\n") -> bytes:
    return ("".join(f"data: {json.dumps(e)}\n\n" for e in events) + end).encode()


TEXT_EVENT = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}


def test_retries_until_the_first_token_only() -> None:
    replies = [
        httpx.Response(503, json=error_body("overloaded")),
        httpx.Response(200, content=event_lines(TEXT_EVENT)),
    ]
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return replies[len(seen) - 1]

    with sync_client(handler) as client:
        retried = Retries(most=2, first_wait_s=0.0)
        assert retried.wait_s(0, PeerUnavailable("x")) == 0.0
        assert retried.wait_s(0, Overloaded("x", 2.0)) == 2.0
        assert retried.wait_s(2, PeerUnavailable("x")) is None
        assert retried.wait_s(0, InvalidRequest("x")) is None
        replies[0] = httpx.Response(500, json=error_body())
        assert [c.text for c in client.stream("x")] == ["a"]
    assert len(seen) == 2
    assert seen[0].headers["authorization"] == "Bearer key"


def test_a_stream_that_broke_after_a_token_is_not_tried_again() -> None:
    num_calls = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal num_calls
        num_calls += 1
        return httpx.Response(200, content=event_lines(TEXT_EVENT, end=""))

    with sync_client(handler) as client:
        texts: list[str] = []
        with pytest.raises(PeerUnavailable):
            texts.extend(c.text for c in client.stream("x"))
    assert num_calls == 1


def test_gives_up_after_the_last_try_with_the_servers_error() -> None:
    num_calls = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal num_calls
        num_calls += 1
        raise httpx.ConnectError("refused", request=request)

    with sync_client(handler) as client:
        with pytest.raises(PeerUnavailable):
            client.chat("x")
        assert not client.is_healthy()
    assert num_calls == 4


def test_a_refused_request_is_not_tried_again() -> None:
    num_calls = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal num_calls
        num_calls += 1
        return httpx.Response(400, json=error_body(param="n"))

    with sync_client(handler) as client:
        with pytest.raises(OutriderError):
            client.complete("x")
    assert num_calls == 1


def test_statistics_read_labels_with_spaces() -> None:
    text = '# TYPE a counter\na{b="c d"} 3\ne 1.5\n'
    assert statistics_of(text) == {'a{b="c d"}': 3.0, "e": 1.5}


def test_summary_says_rate_and_acceptance() -> None:
    tail = Chunk(usage=Usage(5, 11, 6, 2), metrics={"speculative_decoding": {"num_rounds": 5}})
    line = summary(tail, 2.0)
    assert "11 tokens, 5.0 tokens/s, 6 of 8 drafted accepted (75%), 2.20 a round" in line
    assert "nothing drafted" in summary(Chunk(usage=Usage(5, 11)), 0.0)

"""Every stream ends the same way: finishes, usage when asked for, one `[DONE]`, then nothing."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.http.answers import Answer
from cluster.http.call import Call
from cluster.http.text import TextStream
from protos.errors import Overloaded, PeerUnavailable
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.params import SamplingParams
from tests.tiny import EOS_ID, byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, client_of
from tests.unit.cluster.test_waiting import EndlessBackend

TOKENIZER = byte_tokenizer(VOCAB)
IDS = TOKENIZER.encode("one. two. three", add_special_tokens=False)
GOOD: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": ""}]},
}
Item = TokenRun | Exception


def events_of(raw: bytes) -> list[str]:
    """The data of each event; anything that is not one line of data and a blank is a fault."""
    text = raw.decode("utf-8")
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        assert event.startswith("data: ")
        assert "\n" not in event
        found.append(event.removeprefix("data: "))
    return found


def last_run(request: GenerationRequest, reason: FinishReason, stop: int | None) -> list[TokenRun]:
    half = len(IDS) // 2
    tail = tuple(IDS[half:]) + ((stop,) if stop is not None else ())
    return [
        TokenRun(request.request_id, tuple(IDS[:half]), half - 1),
        TokenRun(request.request_id, tail, len(tail) - 1, reason, stop),
    ]


ENDS: dict[str, tuple[str, list[str] | None, int | None, bool]] = {
    "length": ("length", None, None, False),
    "end of text": ("stop", None, EOS_ID, False),
    "stop string": ("stop", [". th"], None, False),
    "empty": ("stop", None, EOS_ID, True),
}


@pytest.mark.parametrize("url", GOOD)
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_stream_ends_once_whatever_ended_its_answers(
    tmp_path: Path, url: str, usage: bool, n: int, end: str
) -> None:
    finish, stop, stop_id, is_empty = ENDS[end]
    reason = FinishReason.STOP if stop_id is not None else FinishReason.LENGTH

    def script(request: GenerationRequest) -> Sequence[Item]:
        if is_empty:
            return [TokenRun(request.request_id, (EOS_ID,), 0, reason, EOS_ID)]
        return last_run(request, reason, stop_id)

    async def go() -> list[str]:
        body: dict[str, object] = {"stream": True, "n": n, "stop": stop}
        body |= GOOD[url]
        if usage:
            body["stream_options"] = {"include_usage": True}
        async with client_of(FakeBackend(script), tmp_path) as client:
            return events_of((await client.post(url, json=body)).content)

    *chunks, done = asyncio.run(go())
    assert done == "[DONE]"
    assert "[DONE]" not in chunks
    told = [json.loads(chunk) for chunk in chunks]
    if usage:
        last = told.pop()
        assert (last["choices"], last["usage"]["completion_tokens"] > 0) == ([], True)
    finishes = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in told]
    assert sorted(f for f in finishes if f[1] is not None) == [(i, finish) for i in range(n)]
    for index in range(n):
        assert [f for f in finishes if f[0] == index][-1][1] == finish


FAULTS: dict[str, tuple[Exception, str]] = {
    "lost": (PeerUnavailable("the verifier went away"), "service_unavailable_error"),
    "full": (Overloaded("full", 1.0), "overloaded_error"),
    "unforeseen": (KeyError("/home/secret.py"), "internal_error"),
}


@pytest.mark.parametrize("url", GOOD)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_stream_is_one_event_before_the_end(
    tmp_path: Path, url: str, n: int, fault: str
) -> None:
    error, kind = FAULTS[fault]
    backend = FakeBackend(lambda r: [TokenRun(r.request_id, tuple(IDS[:3]), 2), error])

    async def go() -> list[str]:
        body: dict[str, object] = {"stream": True, "n": n}
        body["stream_options"] = {"include_usage": True}
        body |= GOOD[url]
        async with client_of(backend, tmp_path) as client:
            return events_of((await client.post(url, json=body)).content)

    *chunks, told, done = asyncio.run(go())
    assert done == "[DONE]"
    assert json.loads(told)["error"]["type"] == kind
    assert "secret" not in told
    assert not any("error" in json.loads(chunk) for chunk in chunks)
    assert backend.num_open == 0


@pytest.mark.parametrize("wrong", [{"n": 0}, {"model": "nope"}, {"prompt": "word " * 400}])
def test_what_is_wrong_before_a_stream_is_no_stream(tmp_path: Path, wrong: dict) -> None:
    async def go() -> None:
        async with client_of(EndlessBackend(), tmp_path) as client:
            body = {"prompt": "x", "stream": True} | wrong
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code in (400, 404)
            assert reply.headers["content-type"] == "application/json"

    asyncio.run(go())


def test_closing_a_call_twice_late_or_before_it_began_is_harmless() -> None:
    num_ended = 0

    def ended() -> None:
        nonlocal num_ended
        num_ended += 1

    async def go(when: str) -> None:
        backend = FakeBackend(lambda r: last_run(r, FinishReason.LENGTH, None))
        request = GenerationRequest("r", (5,), SamplingParams())
        answer = Answer(0, 1, TextStream(TOKENIZER.decode))
        call = Call([answer], [backend.generate(request)], ended)
        if when != "before":
            await call.start()
        if when == "after":
            assert [delta async for delta in call.deltas()][-1].finish == "length"
        for _ in range(3):
            await call.aclose()
        assert backend.num_open == 0

    for number, when in enumerate(("before", "within", "after"), 1):
        asyncio.run(go(when))
        assert num_ended == number

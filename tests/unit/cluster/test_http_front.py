"""The HTTP face over a scripted backend: bodies, streams, ends, faults."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cluster.http.ingress import FrontSettings
from cluster.http.limits import Limits
from protos.errors import Overloaded, PeerUnavailable
from protos.generation import FinishReason, GenerationRequest, SpeculationMode, TokenRun
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, client_of, runs_of

TOKENIZER = byte_tokenizer(VOCAB)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def call(
    backend: FakeBackend,
    tmp_path: Path,
    path: str,
    body: object,
    settings: FrontSettings | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(backend, tmp_path, settings) as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body, headers=headers)
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(go())


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def saying(text: str, run_len: int = 3, drafted: int = 4) -> FakeBackend:
    return FakeBackend(lambda r: runs_of(r, ids_of(text), run_len, drafted))


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("run_len", [1, 2, 5, 100])
def test_stream_joined_equals_reply(tmp_path: Path, run_len: int) -> None:
    text = "Grüße, 世界 🌍!"
    whole = call(saying(text, run_len), tmp_path, "/v1/chat/completions", CHAT).json()
    stream = call(saying(text, run_len), tmp_path, "/v1/chat/completions", CHAT | {"stream": True})
    chunks = events(stream)
    joined = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert whole["choices"][0]["message"]["content"] == joined == text
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert all(c["system_fingerprint"] == "fake-fingerprint" for c in chunks)
    assert all("usage" not in c for c in chunks)
    assert all("�" not in json.dumps(c, ensure_ascii=False) for c in chunks)


def test_usage_counts_accepted_and_rejected_drafts(tmp_path: Path) -> None:
    reply = call(saying("abcdef", 3, drafted=4), tmp_path, "/v1/completions", {"prompt": "x"})
    usage = reply.json()["usage"]
    num = len(ids_of("abcdef"))
    assert usage["completion_tokens"] == num
    details = usage["completion_tokens_details"]
    rounds = -(-num // 3)
    assert details["accepted_prediction_tokens"] == num - rounds
    assert details["rejected_prediction_tokens"] == 4 * rounds - (num - rounds)
    block = reply.json()["metrics"]["speculative_decoding"]
    assert block["num_spec_steps"] == rounds
    assert sum(block["acceptance_histogram"]) == block["num_rounds"] == rounds


def test_usage_counts_prompt_tokens_found_in_the_prefix_cache(tmp_path: Path) -> None:
    def script(request: GenerationRequest) -> list[TokenRun]:
        runs = runs_of(request, [70, 71])
        return [
            replace(run, counts=replace(run.counts, num_cached=2)) for run in runs if run.counts
        ]

    async def go() -> None:
        async with client_of(FakeBackend(script), tmp_path) as client:
            reply = await client.post("/v1/completions", json={"prompt": ["xyz", "abc"]})
            usage = reply.json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
            lines = (await client.get("/metrics")).text.splitlines()
            assert 'vllm:prefix_cache_hits_total{model_name="tiny"} 4' in lines
            num_prompt = usage["prompt_tokens"]
            assert f'vllm:prefix_cache_queries_total{{model_name="tiny"}} {num_prompt}' in lines

    asyncio.run(go())


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        ({}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": None}, False),
    ],
)
def test_usage_chunk_only_when_asked(tmp_path: Path, options: dict, has_usage: bool) -> None:
    body = {"prompt": "x", "stream": True} | options
    chunks = events(call(saying("abc"), tmp_path, "/v1/completions", body))
    assert bool(chunks[-1].get("usage")) is has_usage
    if has_usage:
        assert chunks[-1]["choices"] == []
        assert all(c["usage"] is None for c in chunks[:-1])


@pytest.mark.parametrize("run_len", [1, 4, 16])
def test_stop_string_cuts_and_cancels_the_rest(tmp_path: Path, run_len: int) -> None:
    backend = saying("one. two. three. four. five", run_len)
    body = {"prompt": "x", "stop": [". th"], "return_token_ids": True}
    reply = call(backend, tmp_path, "/v1/completions", body).json()
    choice = reply["choices"][0]
    assert choice["text"] == "one. two"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ". th"
    assert len(choice["token_ids"]) == reply["usage"]["completion_tokens"]
    assert TOKENIZER.decode(choice["token_ids"]).startswith("one. two. th")
    assert backend.num_open == 0
    assert backend.num_played == -(-reply["usage"]["completion_tokens"] // run_len)


def test_a_stop_token_is_not_shown_and_named_where_the_caller_asked_for_it(tmp_path: Path) -> None:
    stop_id = ids_of("b")[0]

    def script(request):
        return [
            TokenRun(request.request_id, (ids_of("a")[0], stop_id), 1, FinishReason.STOP, stop_id)
        ]

    for asked, reason in (([stop_id], stop_id), ([], None)):
        body = {"prompt": "x", "stop_token_ids": asked}
        reply = call(FakeBackend(script), tmp_path, "/v1/completions", body).json()
        choice = reply["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
        assert choice["stop_reason"] == reason
        assert reply["usage"]["completion_tokens"] == 2


def test_half_a_character_is_flushed_once_at_the_end(tmp_path: Path) -> None:
    ids = ids_of("a🌍")[:-2]
    backend = FakeBackend(lambda r: runs_of(r, ids))
    chunks = events(call(backend, tmp_path, "/v1/completions", {"prompt": "x", "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == TOKENIZER.decode(ids)


def test_several_prompts_give_indexed_choices(tmp_path: Path) -> None:
    backend = FakeBackend(lambda r: runs_of(r, list(r.prompt_ids), 2))
    body = {
        "prompt": ["first", "second one", "3"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = events(call(backend, tmp_path, "/v1/completions", body))
    texts = ["", "", ""]
    finishes = [0, 0, 0]
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        finishes[choice["index"]] += choice["finish_reason"] is not None
    assert texts == body["prompt"]
    assert finishes == [1, 1, 1]
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(ids_of(t)) for t in body["prompt"])
    assert backend.num_open == 0


def test_requests_carry_seed_and_override(tmp_path: Path) -> None:
    backend = saying("abc")
    body = CHAT | {"seed": 7, "temperature": 0, "speculation": {"mode": "eagle3", "depth": 3}}
    assert call(backend, tmp_path, "/v1/chat/completions", body).status_code == 200
    request = backend.requests[0]
    assert request.params.seed == 7
    assert request.params.max_tokens == 64 - len(request.prompt_ids)
    assert request.speculation.mode is SpeculationMode.FIXED
    assert request.speculation.drafters == ("eagle3",)
    call(backend, tmp_path, "/v1/chat/completions", CHAT)
    call(backend, tmp_path, "/v1/chat/completions", CHAT)
    assert backend.requests[1].params.seed != backend.requests[2].params.seed


def test_errors_before_the_first_token_are_plain_statuses(tmp_path: Path) -> None:
    for error, status in (
        (Overloaded("full", 3.0), 503),
        (PeerUnavailable("gone"), 503),
        (RuntimeError("/home/x.py"), 500),
    ):
        backend = FakeBackend(lambda r, e=error: [e])
        for stream in (False, True):
            reply = call(backend, tmp_path, "/v1/completions", {"prompt": "x", "stream": stream})
            assert reply.status_code == status
            assert "/home" not in reply.text
            assert ("retry-after" in reply.headers) is (status == 503)
        assert backend.num_open == 0


def test_error_in_a_stream_is_one_event_then_the_end(tmp_path: Path) -> None:
    backend = FakeBackend(lambda r: [*runs_of(r, ids_of("a b"))[:2], RuntimeError("/home/x.py")])
    reply = call(backend, tmp_path, "/v1/completions", {"prompt": "x", "stream": True})
    found = events(reply)
    assert [bool(e.get("error")) for e in found] == [False, False, True]
    assert found[-1]["error"]["type"] == "internal_error"
    assert "/home" not in reply.text
    assert backend.num_open == 0


def test_keys_guard_v1_only(tmp_path: Path) -> None:
    settings = FrontSettings(("tiny",), keys=("k1", "k2"))

    async def go() -> None:
        async with client_of(saying("abc"), tmp_path, settings) as client:
            for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "k1"}):
                reply = await client.get("/v1/models", headers=headers)
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
            for key in ("k1", "k2"):
                headers = {"authorization": f"Bearer {key}"}
                assert (await client.get("/v1/models", headers=headers)).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200

    asyncio.run(go())


def test_models_metrics_and_http_faults(tmp_path: Path) -> None:
    async def go() -> None:
        async with client_of(saying("abcdef", 3), tmp_path) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 64
            for path, method, status in (
                ("/v1/models/nope", "GET", 404),
                ("/nope", "GET", 404),
                ("/v1/completions", "GET", 405),
            ):
                reply = await client.request(method, path)
                assert reply.status_code == status
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            await client.post("/v1/completions", json={"prompt": "x"})
            text = (await client.get("/metrics")).text
            assert (
                'vllm:request_success_total{model_name="tiny",finished_reason="length"} 1' in text
            )
            assert "vllm:spec_decode_num_drafts_total" in text
            assert "outrider_verifier_steps_total 3" in text
            assert 'vllm:time_to_first_token_seconds_bucket{model_name="tiny",le="+Inf"} 1' in text

    asyncio.run(go())


def test_gate_refuses_beyond_the_limit_and_recovers(tmp_path: Path) -> None:
    async def go() -> None:
        started = asyncio.Event()
        release = asyncio.Event()

        class Slow(FakeBackend):
            async def generate(self, request):
                started.set()
                await release.wait()
                async for run in super().generate(request):
                    yield run

        backend = Slow(lambda r: runs_of(r, ids_of("abc")))
        settings = FrontSettings(("tiny",), limits=Limits(max_requests=1))
        async with client_of(backend, tmp_path, settings) as client:
            first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            await started.wait()
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            release.set()
            assert (await first).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    asyncio.run(go())

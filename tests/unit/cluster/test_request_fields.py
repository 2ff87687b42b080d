"""Every field that clients of such APIs send is used, tolerated, or refused by its name."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cluster.http.ingress import FrontSettings
from cluster.http.refused import REFUSED
from protos.generation import FinishReason, GenerationRequest, TokenRun
from tests.tiny import EOS_ID, byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, answering, client_of, runs_of

TOKENIZER = byte_tokenizer(VOCAB)
USER = [{"role": "user", "content": "hi"}]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
Reads = Callable[[GenerationRequest], object]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def ask(
    path: Path, url: str, fields: dict[str, object], backend: FakeBackend | None = None
) -> tuple[httpx.Response, FakeBackend]:
    """Post a good body with these fields; the reply, and the backend that saw it."""
    own = backend or FakeBackend(answering(ids_of("abc")))
    body = ({"prompt": "x"} if url == COMPLETION else {"messages": USER}) | fields

    async def go() -> httpx.Response:
        async with client_of(own, path) as client:
            return await client.post(url, json=body)

    return asyncio.run(go()), own


USED: list[tuple[str, object, Reads, object]] = [
    ("temperature", 0.5, lambda r: r.params.temperature, 0.5),
    ("top_p", 0.5, lambda r: r.params.top_p, 0.5),
    ("top_k", 7, lambda r: r.params.top_k, 7),
    ("min_p", 0.25, lambda r: r.params.min_p, 0.25),
    ("seed", 11, lambda r: r.params.seed, 11),
    ("max_tokens", 9, lambda r: r.params.max_tokens, 9),
    ("min_tokens", 2, lambda r: r.options.min_tokens, 2),
    ("stop_token_ids", [5], lambda r: r.params.stop_token_ids, (5,)),
    ("ignore_eos", True, lambda r: r.params.ignore_eos, True),
    ("presence_penalty", 0.5, lambda r: r.options.presence_penalty, 0.5),
    ("frequency_penalty", -0.5, lambda r: r.options.frequency_penalty, -0.5),
    ("repetition_penalty", 1.5, lambda r: r.options.repetition_penalty, 1.5),
    ("logit_bias", {"5": -3}, lambda r: r.options.logit_bias, ((5, -3.0),)),
    ("allowed_token_ids", [5, 6], lambda r: r.options.allowed_token_ids, (5, 6)),
    ("timeout_s", 30, lambda r: r.timeout_s, 30.0),
]


@pytest.mark.parametrize("url", [COMPLETION, CHAT])
@pytest.mark.parametrize(("name", "value", "reads", "seen"), USED, ids=[c[0] for c in USED])
def test_a_field_reaches_the_verifier(
    tmp_path: Path, url: str, name: str, value: object, reads: Reads, seen: object
) -> None:
    reply, backend = ask(tmp_path, url, {name: value})
    assert reply.status_code == 200
    assert reads(backend.requests[0]) == seen


TOLERATED = {
    "user": "someone",
    "metadata": {"a": "b"},
    "request_id": "mine",
    "session_id": "s",
    "parallel_tool_calls": False,
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "max_token": 5,
}


@pytest.mark.parametrize("url", [COMPLETION, CHAT])
def test_fields_that_change_no_answer_are_tolerated(tmp_path: Path, url: str) -> None:
    assert ask(tmp_path, url, TOLERATED)[0].status_code == 200


def other_than(neutral: tuple[object, ...]) -> object:
    """A value that asks for something."""
    return next(v for v in (True, ["x"], "x", 3) if v not in neutral)


OWN = {COMPLETION: ("best_of", "echo"), CHAT: ("top_logprobs",)}
"""Refused at the other endpoint only: a chat's prompt is never shown, a completion's may be."""


@pytest.mark.parametrize(
    ("url", "name"),
    [(url, name) for url in OWN for name in sorted(REFUSED) if name not in OWN[url]],
)
def test_what_is_not_supported_is_refused_by_name_and_its_neutral_values_pass(
    tmp_path: Path, url: str, name: str
) -> None:
    async def go() -> None:
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            body: dict[str, object] = {"prompt": "x", "messages": USER}
            asks = await client.post(url, json=body | {name: other_than(REFUSED[name])})
            assert (asks.status_code, asks.json()["error"]["param"]) == (400, name)
            assert name in asks.json()["error"]["message"]
            for value in (None, *REFUSED[name]):
                assert (await client.post(url, json=body | {name: value})).status_code == 200

    asyncio.run(go())


def stopping(ids: tuple[int, ...], stop_id: int) -> FakeBackend:
    """Says these ids, the last of which ends the text."""
    return FakeBackend(lambda r: [TokenRun(r.request_id, ids, 0, FinishReason.STOP, stop_id)])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "a"),
        ({"skip_special_tokens": True}, "a"),
        ({"skip_special_tokens": False}, "<|im_start|>a"),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "<|im_start|>a<|im_end|>",
        ),
        ({"include_stop_str_in_output": True}, "a"),
    ],
)
def test_special_tokens_are_text_only_when_asked_for(
    tmp_path: Path, fields: dict[str, object], text: str
) -> None:
    backend = stopping((1, *ids_of("a"), EOS_ID), EOS_ID)
    reply, _ = ask(tmp_path, COMPLETION, fields, backend)
    assert reply.json()["choices"][0]["text"] == text
    assert reply.json()["usage"]["completion_tokens"] == 3


def test_a_stop_id_is_shown_when_stops_are(tmp_path: Path) -> None:
    stop_id = ids_of("b")[0]
    fields: dict[str, object] = {"stop_token_ids": [stop_id], "include_stop_str_in_output": True}
    reply, _ = ask(tmp_path, COMPLETION, fields, stopping((*ids_of("a"), stop_id), stop_id))
    assert reply.json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({}, "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": True}, "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "hello <|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nhello "),
        ({"continue_final_message": False}, "<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_chat_begins_as_its_template_is_told(
    tmp_path: Path, fields: dict[str, object], ends: str
) -> None:
    messages = [*USER, {"role": "assistant", "content": "hello "}]
    reply, backend = ask(tmp_path, CHAT, {"messages": messages} | fields)
    assert reply.status_code == 200
    assert TOKENIZER.decode(backend.requests[0].prompt_ids).endswith(ends)


def test_a_message_is_not_continued_and_followed_at_once(tmp_path: Path) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    reply, _ = ask(tmp_path, CHAT, both)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "continue_final_message")


def test_usage_so_far_counts_what_was_shown_so_far(tmp_path: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields: dict[str, object] = {
        "stream": True,
        "stream_options": options,
        "return_token_ids": True,
    }
    backend = FakeBackend(lambda r: runs_of(r, ids_of("abcdefg"), 2))
    reply, _ = ask(tmp_path, COMPLETION, {"prompt": ["x", "yz"], "n": 2} | fields, backend)
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
    shown = 0
    for chunk in chunks[:-1]:
        shown += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == shown
        assert chunk["usage"]["prompt_tokens"] == len(ids_of("x")) + len(ids_of("yz"))
    assert chunks[-1]["usage"]["completion_tokens"] == shown == 4 * len(ids_of("abcdefg"))
    alone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    refused, _ = ask(tmp_path, COMPLETION, alone)
    assert refused.json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_a_callers_request_id_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            for given in ("mine-1", "x" * 4000, "\x01"):
                headers = {"X-Request-Id": given}
                await client.post(COMPLETION, json={"prompt": "x"}, headers=headers)

    with caplog.at_level(logging.INFO, "cluster.http.serving"):
        asyncio.run(go())
    first, long, odd = (record.getMessage() for record in caplog.records)
    assert "(mine-1)" in first
    assert len(long) < 400
    assert "\x01" not in odd


def test_models_beside_the_first_are_named_in_replies(tmp_path: Path) -> None:
    async def go() -> None:
        settings = FrontSettings(("one", "two"))
        async with client_of(FakeBackend(answering([70])), tmp_path, settings) as client:
            for asked, said in ((None, "one"), ("one", "one"), ("two", "two")):
                reply = await client.post(COMPLETION, json={"prompt": "x", "model": asked})
                assert reply.json()["model"] == said

    asyncio.run(go())

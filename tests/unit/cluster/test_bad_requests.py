"""Bad and odd bodies: the status, the named parameter, a bounded reply, and life after it."""

import asyncio
import json
from pathlib import Path

import pytest

from cluster.http.ingress import FrontSettings
from cluster.http.limits import Limits
from tests.unit.cluster.http_fakes import FakeBackend, client_of, runs_of

USER = [{"role": "user", "content": "hi"}]
OK = 200

COMPLETIONS: list[tuple[dict, int, str | None]] = [
    ({}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [""]}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": " "}, OK, None),
    ({"prompt": [5, 6]}, OK, None),
    ({"prompt": [[5], [6, 7]]}, OK, None),
    ({"prompt": [384]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [999999]}, 400, "prompt"),
    ({"prompt": [10**400]}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": ["a", 5]}, 400, "prompt"),
    ({"prompt": [5, "a"]}, 400, "prompt"),
    ({"prompt": ["a", [5]]}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": ["a"] * 100_000}, 400, "prompt"),
    ({"prompt": "word " * 64}, 400, "prompt"),
    ({"prompt": "x" * 500_000}, 400, "prompt"),
    ({"prompt": "emoji 🌍 and \x00"}, OK, None),
    ({"model": "nope"}, 404, "model"),
    ({"model": None}, OK, None),
    ({"model": 5}, 400, "model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 2.1}, 400, "temperature"),
    ({"temperature": "1"}, 400, "temperature"),
    ({"temperature": 1e-12}, OK, None),
    ({"temperature": 1e-8, "top_p": 1e-9}, OK, None),
    ({"temperature": 1e-4}, OK, None),
    ({"temperature": 0, "top_p": 0}, OK, None),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_p": 1e-9}, OK, None),
    ({"top_k": 0}, OK, None),
    ({"top_k": -1}, OK, None),
    ({"top_k": -2}, 400, "top_k"),
    ({"top_k": 10**9}, OK, None),
    ({"top_k": 10**400}, 400, "top_k"),
    ({"min_p": 1.5}, 400, "min_p"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": -(2**63)}, OK, None),
    ({"seed": 1.5}, 400, "seed"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 0, "echo": True}, 400, "max_tokens"),
    ({"max_tokens": 2**63, "echo": True}, OK, None),
    ({"max_tokens": None}, OK, None),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": 2**31}, OK, None),
    ({"max_tokens": 2**63}, OK, None),
    ({"stop": ""}, 400, "stop[0]"),
    ({"stop": ["a", ""]}, 400, "stop[1]"),
    ({"stop": []}, OK, None),
    ({"stop": None}, OK, None),
    ({"stop": "x"}, OK, None),
    ({"stop": list("abcde")}, OK, None),
    ({"stop": [1]}, 400, "stop[0]"),
    ({"stop": "y" * 10_000}, 400, "stop[0]"),
    ({"stop": ["z"] * 500_000}, 400, "stop"),
    ({"stop_token_ids": [384]}, 400, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        400,
        "stream_options.include_usage",
    ),
    ({"stream": "true"}, 400, "stream"),
    ({"speculation": {"mode": "nope"}}, 400, "speculation"),
    ({"speculation": {"mode": "off", "depth": 3}}, 400, "speculation"),
    ({"speculation": {"mode": "eagle3", "width": 0}}, 400, "speculation.width"),
    ({"speculation": {"mode": "eagle3", "block": 4, "depth": 2}}, 400, "speculation"),
    ({"speculation": {"mode": "eagle3", "dept": 2}}, 400, "speculation.dept"),
    ({"speculation": {"mode": "eagle3", "shape": "bush"}}, 400, "speculation.shape"),
    ({"speculation": {"mode": "eagle3", "shape": "static", "width": 3}}, 400, "speculation"),
    ({"speculation": {"mode": "eagle3", "shape": "static", "nodes": 12}}, OK, None),
    ({"speculation": "off"}, 400, "speculation"),
    ({"speculation": {"mode": "eagle3+ngram", "depth": 4}}, OK, None),
    ({"n": 2}, OK, None),
    ({"n": 16, "prompt": "x"}, OK, None),
    ({"n": 17}, 400, "n"),
    ({"n": 10**6}, 400, "n"),
    ({"n": -1}, 400, "n"),
    ({"n": 10, "prompt": ["a"] * 7}, 400, "n"),
    ({"n": 0}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"n": 1}, OK, None),
    ({"best_of": 3}, 400, "best_of"),
    ({"best_of": 1, "n": 2}, 400, "best_of"),
    ({"best_of": 2, "n": 2}, OK, None),
    ({"best_of": "2", "n": 2}, 400, "best_of"),
    ({"echo": True}, OK, None),
    ({"echo": 1}, 400, "echo"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": -1}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"logprobs": 2 * 10**9}, 400, "logprobs"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"prompt_logprobs": 2}, 400, "prompt_logprobs"),
    ({"logprobs": None}, OK, None),
    ({"logit_bias": {"5": 1, "6": -100.0}}, OK, None),
    ({"logit_bias": {}}, OK, None),
    ({"logit_bias": {"384": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 100.1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, 400, "logit_bias"),
    ({"logit_bias": [5, 1]}, 400, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, 400, "logit_bias"),
    ({"allowed_token_ids": [5]}, OK, None),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [384]}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [10**400]}, 400, "allowed_token_ids"),
    ({"presence_penalty": 0.5, "frequency_penalty": -2}, OK, None),
    ({"presence_penalty": 2.01}, 400, "presence_penalty"),
    ({"frequency_penalty": "1"}, 400, "frequency_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 1.3}, OK, None),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, 400, "repetition_penalty"),
    ({"min_tokens": 3}, OK, None),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
    ({"min_tokens": 10**400}, 400, "min_tokens"),
    ({"bad_words": ["x"]}, 400, "bad_words"),
    ({"bad_words": ["x"] * 500_000}, 400, "bad_words"),
    ({"acceptance": "rejection"}, 400, "acceptance"),
    ({"acceptance": "typical"}, 400, "acceptance"),
    ({"acceptance": 1}, 400, "acceptance"),
    ({"acceptance": "exact"}, OK, None),
    ({"acceptance": None}, OK, None),
    ({"user": "someone", "max_token": 5, "metadata": {"a": 1}}, OK, None),
]

CHATS: list[tuple[dict, int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": None}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "foo", "content": "hi"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ""}]}, OK, None),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, OK, None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    ({"messages": [5] * 5000}, 400, "messages"),
    ({"messages": [5] * 50}, 400, "messages[0]"),
    ({"messages": USER * 3000}, 400, "messages"),
    ({"messages": USER * 30}, 400, "messages"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": -1}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": "5"}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": 1.5}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": 2**63}, OK, None),
    ({"max_completion_tokens": None, "max_tokens": None}, OK, None),
    ({"max_completion_tokens": 5, "max_tokens": 9}, OK, None),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, 400, "top_logprobs"),
    ({"echo": True}, 400, "echo"),
    ({"best_of": 2}, 400, "best_of"),
    ({"n": 3}, OK, None),
    ({"n": 65}, 400, "n"),
    ({"logprobs": False, "top_logprobs": None}, OK, None),
    ({"top_logprobs": 0}, 400, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, OK, None),
    ({"response_format": {"type": "text"}}, OK, None),
    ({"response_format": {"type": "json_object"}}, OK, None),
    ({"service_tier": "auto", "store": False}, OK, None),
]

RAW: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"null", 400),
    (b"prompt=x&n=1", 400),
    (b'{"prompt": "x"', 400),
    (b'{"prompt": "\\ud83d"}', 400),
    (b'{"prompt": "x", "stop": "\\udcf0"}', 400),
    (b'{"prompt": "x", "model": "\\ud83d"}', 400),
    (b'{"prompt": "x", "user": "\\ud83d"}', 400),
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "x", "temperature": NaN}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "x", "extra": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400),
    (b'{"prompt": "a", "prompt": "x"}', 200),
    (b'{"prompt": [' + b'1,"a",' * 50_000 + b"1]}", 400),
]


def backend() -> FakeBackend:
    return FakeBackend(lambda r: runs_of(r, [70, 71, 72]))


def check(path: Path, cases: list[tuple[str, bytes, int, str | None]]) -> None:
    """Every case in turn on one front, streamed and not, then a good request."""

    async def go() -> list[str]:
        wrong: list[str] = []
        async with client_of(backend(), path) as client:
            for url, body, status, param in cases:
                reply = await client.post(url, content=body)
                what = body[:80]
                if reply.status_code != status:
                    wrong.append(f"{what!r}: {reply.status_code}, not {status}: {reply.text[:90]}")
                elif status != OK:
                    error = reply.json()["error"]
                    if param is not None and error["param"] != param:
                        wrong.append(f"{what!r}: param {error['param']}, not {param}")
                    if len(reply.content) > 4096 or "/" in error["message"].split("/v1")[0]:
                        wrong.append(f"{what!r}: reply too long or with a path")
            good = await client.post("/v1/completions", json={"prompt": "x"})
            assert good.status_code == OK
        return wrong

    assert asyncio.run(go()) == []


@pytest.mark.parametrize("stream", [False, True])
def test_completions_refuse_by_name(tmp_path: Path, stream: bool) -> None:
    cases = []
    for fields, status, param in COMPLETIONS:
        if stream and param == "stream_options":
            continue
        body = ({"prompt": "x"} if fields else {}) | ({"stream": True} if stream else {}) | fields
        cases.append(("/v1/completions", json.dumps(body).encode(), status, param))
    check(tmp_path, cases)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_refuses_by_name(tmp_path: Path, stream: bool) -> None:
    cases = []
    for fields, status, param in CHATS:
        body = {"messages": USER, "stream": stream} | fields
        cases.append(("/v1/chat/completions", json.dumps(body).encode(), status, param))
    check(tmp_path, cases)


def test_broken_bodies_are_bounded_400s(tmp_path: Path) -> None:
    check(tmp_path, [("/v1/completions", body, status, None) for body, status in RAW])


def test_too_large_a_body_is_413_whatever_was_declared(tmp_path: Path) -> None:
    async def chunks():
        for _ in range(100):
            yield b"x" * 1024

    async def go() -> None:
        settings = FrontSettings(("tiny",), limits=Limits(max_body_bytes=10_000))
        async with client_of(backend(), tmp_path, settings) as client:
            declared = await client.post("/v1/completions", content=b"x" * 20_000)
            streamed = await client.post("/v1/completions", content=chunks())
            assert declared.status_code == streamed.status_code == 413
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == OK

    asyncio.run(go())

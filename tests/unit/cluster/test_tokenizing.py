"""/tokenize and /detokenize: the ids of a call, in vLLM's shapes, behind the same keys."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.http.beside import MUCH
from cluster.http.ingress import FrontSettings
from cluster.http.text import load_text
from cluster.http.tokenizing import Tokenizing
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, answering, client_of

TOKENIZER = byte_tokenizer(VOCAB)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Grüße, 世界"}]


def post(path: Path, url: str, body: object, settings: FrontSettings | None = None) -> dict:
    async def go() -> dict:
        async with client_of(FakeBackend(answering([70])), path, settings) as client:
            reply = await client.post(url, json=body)
            return {"status": reply.status_code} | reply.json()

    return asyncio.run(go())


def test_ids_of_a_text_and_back(tmp_path: Path) -> None:
    text = "Grüße <|im_end|> 世界 🌍"
    found = post(tmp_path, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == TOKENIZER.encode(text)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 64
    assert found["token_strs"] == TOKENIZER.convert_ids_to_tokens(found["tokens"])
    assert post(tmp_path, "/detokenize", {"tokens": found["tokens"]})["prompt"] == text
    assert post(tmp_path, "/tokenize", {"prompt": ""})["count"] == 0
    assert post(tmp_path, "/detokenize", {"tokens": []})["prompt"] == ""
    assert post(tmp_path, "/tokenize", {"prompt": "x"})["token_strs"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_special_tokens": True},
    ],
)
def test_ids_of_messages_are_those_a_chat_starts_from(tmp_path: Path, fields: dict) -> None:
    async def go() -> None:
        backend = FakeBackend(answering([70]))
        async with client_of(backend, tmp_path) as client:
            body = {"messages": CHAT} | fields
            found = (await client.post("/tokenize", json=body)).json()
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert tuple(found["tokens"]) == backend.requests[0].prompt_ids

    asyncio.run(go())


def test_null_is_nothing_given(tmp_path: Path) -> None:
    text, chat = {"prompt": "word"}, {"messages": CHAT}
    for asked, other in ((text, {"messages": None}), (chat, {"prompt": None})):
        assert post(tmp_path, "/tokenize", asked | other) == post(tmp_path, "/tokenize", asked)


def test_a_text_longer_than_the_context_is_counted_all_the_same(tmp_path: Path) -> None:
    assert post(tmp_path, "/tokenize", {"prompt": "word " * 9000})["count"] > 9000


def test_what_is_long_does_not_hold_the_event_loop_up(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    text, met = load_text(tmp_path), list[tuple[str, str]]()

    def noting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: object) -> object:
            met.append((name, threading.current_thread().name))
            return work(*args)

        return noted

    watched = replace(
        text,
        encode=noting("encode", text.encode),
        encode_chat=noting("chat", text.encode_chat),
        decode_all=noting("decode", text.decode_all),
        entry=noting("entry", text.entry),
    )
    both = Tokenizing(watched, lambda name: None, lambda: 64)
    here = threading.current_thread().name

    async def told(long: str) -> set[str]:
        """What met this thread, the loop's own."""
        met.clear()
        body = json.dumps({"prompt": long, "return_token_strs": True}).encode()
        tokens = (await both.tokenize(body))["tokens"]
        await both.tokenize(json.dumps({"messages": [CHAT[0] | {"content": long}]}).encode())
        await both.detokenize(json.dumps({"tokens": tokens}).encode())
        assert {name for name, _ in met} == {"encode", "chat", "decode", "entry"}
        return {name for name, thread in met if thread == here}

    assert asyncio.run(told("short")) == {"encode", "chat", "decode", "entry"}
    assert asyncio.run(told("x" * 4 * MUCH)) == set()


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": None}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, "model"),
        ("/tokenize", [], None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**400]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "nope"}, "model"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, url: str, body: object, param: str | None) -> None:
    found = post(tmp_path, url, body)
    assert found["status"] == (404 if param == "model" else 400)
    assert found["error"]["param"] == param


@pytest.mark.parametrize("url", ["/tokenize", "/detokenize"])
def test_keys_guard_them_too(tmp_path: Path, url: str) -> None:
    settings = FrontSettings(("tiny",), keys=("k1",))
    assert post(tmp_path, url, {"prompt": "a", "tokens": [5]}, settings)["status"] == 401


def test_the_version_is_the_distributions(tmp_path: Path) -> None:
    async def go() -> None:
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            assert set((await client.get("/version")).json()) == {"version"}
            assert (await client.get("/ping")).json() == (await client.get("/health")).json()

    asyncio.run(go())

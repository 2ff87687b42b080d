"""The OpenAPI document is true: what is served stands in it, and replies are as it says."""

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest
from starlette.routing import Route

from cluster.http.ingress import Front, FrontSettings
from cluster.http.openapi import DOCUMENT_PATH
from cluster.http.text import load_text
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, answering, client_of
from tests.unit.cluster.openapi_fuzz import fuzz

KEY = "k1"
USER = [{"role": "user", "content": "hi"}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CALLS: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "logprobs": 3, "echo": True}),
    ("/v1/completions", {"prompt": "x", "return_token_ids": True, "logprobs": 0} | STREAM),
    ("/v1/completions", {"prompt": "x", "acceptance": "rejection"}),
    ("/v1/completions", {"prompt": "x", "acceptance": "rejection"} | STREAM),
    ("/v1/completions", {"prompt": "x", "stop": "d"}),
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "n": 2} | STREAM),
    (
        "/v1/chat/completions",
        {
            "messages": USER,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [70, 71]}),
    ("/v1/completions", {"prompt": "x", "n": 0}),
    ("/v1/completions", {"prompt": "x", "model": "nope"}),
    ("/v1/models", {}),
    ("/v1/models/tiny", {}),
    ("/v1/models/nope", {}),
    ("/health", {}),
    ("/ping", {}),
    ("/version", {}),
]


def backend() -> FakeBackend:
    return FakeBackend(answering([70, 71, 72], 2), drafters_with_q=("ngram", "eagle3"))


def schema_of(document: dict, path: str, method: str, status: int, kind: str) -> dict:
    """What the document says of one reply, with the components it refers to."""
    path = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    said = document["paths"][path][method]["responses"][str(status)]["content"][kind]
    return said | {"components": document["components"]}


def check(document: dict, path: str, method: str, status: int, kind: str, body: str) -> None:
    said = schema_of(document, path, method, status, kind)
    whole = {"components": said["components"]}
    if kind == "application/json":
        jsonschema.validate(json.loads(body), said["schema"] | whole)
        return
    for event in body.strip().split("\n\n"):
        data = event.removeprefix("data: ")
        value = data if data == "[DONE]" else json.loads(data)
        jsonschema.validate(value, said["x-event-data"] | whole)


@pytest.mark.parametrize("has_keys", [False, True])
def test_every_reply_is_as_the_document_says(tmp_path: Path, has_keys: bool) -> None:
    async def go() -> None:
        settings = FrontSettings(("tiny",), keys=(KEY,) if has_keys else ())
        async with client_of(backend(), tmp_path, settings) as client:
            document = (await client.get(DOCUMENT_PATH)).json()
            for key in (KEY, "wrong") if has_keys else (KEY,):
                headers = {"Authorization": f"Bearer {key}"}
                for path, body in CALLS:
                    method = "post" if body else "get"
                    reply = await client.request(method, path, json=body or None, headers=headers)
                    kind = reply.headers["content-type"].partition(";")[0]
                    check(document, path, method, reply.status_code, kind, reply.text)

    asyncio.run(go())


@pytest.mark.parametrize("has_keys", [False, True])
def test_what_is_served_is_described_and_nothing_else(tmp_path: Path, has_keys: bool) -> None:
    byte_tokenizer(VOCAB).save_pretrained(tmp_path)
    settings = FrontSettings(("tiny",), keys=(KEY,) if has_keys else ())
    front = Front(backend(), load_text(tmp_path), settings)
    served = {
        (method, route.path.replace("{name:path}", "{name}"))
        for route in front.app().routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    document = front.document
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    assert served == described | {("GET", DOCUMENT_PATH)}
    guarded = {
        path
        for path, item in document["paths"].items()
        for operation in item.values()
        if "security" in operation and "401" in operation["responses"]
    }
    open_ones = {"/health", "/ping", "/version", "/metrics"}
    assert guarded == ({path for _, path in described} - open_ones if has_keys else set())
    assert ("securitySchemes" in document["components"]) is has_keys


def test_bodies_drawn_from_the_document_are_answered_as_it_says(tmp_path: Path) -> None:
    byte_tokenizer(VOCAB).save_pretrained(tmp_path)
    settings = FrontSettings(("tiny",), keys=(KEY,))
    app = Front(backend(), load_text(tmp_path), settings).app()
    found = fuzz(app, KEY, num_examples=3)
    assert found.faults == []
    for name in ("not_a_server_error", "response_schema_conformance", "ignored_auth"):
        assert found.num_checks[name] > 300

"""`response_format` and `structured_outputs`: what they become, what is refused in whose words."""

import asyncio
import json
from pathlib import Path

import pytest

from cluster.http.structured import MAX_OPTIONS, grammar_of
from protos.errors import InvalidRequest
from protos.generation import GenerationRequest
from protos.grammar import GRAMMAR_PARAM, MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from tests.unit.cluster.http_fakes import FakeBackend, answering, client_of, runs_of

SCHEMA = {"type": "object", "properties": {"z": {}, "a": {"const": "\u00e4"}}}
NAMED = {"name": "pet", "schema": SCHEMA, "strict": True}
URLS = ("/v1/completions", "/v1/chat/completions")
BODY = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}


def as_schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": False}, {"strict": True}])
def test_a_schema_is_kept_whole_and_in_order_strict_or_not(strict: dict):
    named = {"name": "pet", "description": "a pet", "schema": SCHEMA} | strict
    grammar = grammar_of({"type": "json_schema", "json_schema": named}, None)
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert list(json.loads(grammar.text)["properties"]) == ["z", "a"]
    assert json.loads(grammar.text) == SCHEMA


def test_json_object_is_any_object_and_text_is_anything():
    assert grammar_of({"type": "json_object"}, None) == as_schema('{"type": "object"}')
    assert grammar_of({"type": "text"}, None) is None
    assert grammar_of(None, None) is None
    assert grammar_of({"type": "text"}, {"regex": "a"}) == Grammar(GrammarKind.REGEX, "a")


@pytest.mark.parametrize(
    ("outputs", "grammar"),
    [
        ({"json": SCHEMA}, as_schema(json.dumps(SCHEMA, ensure_ascii=False))),
        ({"json": '{"type": "null"}'}, as_schema('{"type": "null"}')),
        ({"json_object": True}, as_schema('{"type": "object"}')),
        ({"regex": "[a-z]+"}, Grammar(GrammarKind.REGEX, "[a-z]+")),
        ({"grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"choice": ['a"', "b", 'a"']}, Grammar(GrammarKind.LARK, 'start: "a\\"" | "b"')),
        ({"regex": "a", "json_object": False}, Grammar(GrammarKind.REGEX, "a")),
    ],
    ids=str,
)
def test_the_names_of_vllm_are_read_too(outputs: dict, grammar: Grammar):
    assert grammar_of(None, outputs) == grammar


WRONG: list[dict] = [
    {"response_format": {}},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "structural_tag", "structures": []}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": [1]}}},
    {"response_format": {"type": "json_schema", "json_schema": NAMED | {"name": ""}}},
    {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": "yes"}}},
    {"response_format": {"type": "json_schema", "json_schema": NAMED | {"also": 1}}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": "json"},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"regex": ""}},
    {"structured_outputs": {"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": [""]}},
    {"structured_outputs": {"choice": ["a"] * (MAX_OPTIONS + 1)}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {"guided_json": SCHEMA},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
    {"guided_grammar": 'start: "a"'},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
]


def test_what_cannot_be_meant_is_refused_by_the_name_of_its_field(tmp_path: Path):
    async def go() -> list[str]:
        wrong: list[str] = []
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            for url in URLS:
                for stream in (False, True):
                    for fields in WRONG:
                        reply = await client.post(url, json=BODY | fields | {"stream": stream})
                        error = reply.json()["error"]
                        param = next(iter(fields))
                        good = reply.status_code == 400 and len(reply.content) < 1000
                        if not good or not error["param"].startswith(param):
                            wrong.append(f"{url} {fields}: {reply.status_code} {error}"[:300])
        return wrong

    assert asyncio.run(go()) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_verifier_that_cannot_keep_it_is_told_in_the_users_words(
    tmp_path: Path, fields: dict, stream: bool
):
    def refusing(request: GenerationRequest):
        assert request.options.grammar is not None
        return [InvalidRequest("the grammar cannot be used: no such type", GRAMMAR_PARAM)]

    async def go() -> None:
        async with client_of(FakeBackend(refusing), tmp_path) as client:
            reply = await client.post(URLS[1], json=BODY | fields | {"stream": stream})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == next(iter(fields))
            assert "no such type" in error["message"]

    asyncio.run(go())


def test_a_form_that_fails_in_the_middle_of_a_stream_names_its_field_too(tmp_path: Path):
    def failing(request: GenerationRequest):
        refused = InvalidRequest("the grammar cannot be used: no such type", GRAMMAR_PARAM)
        return [*runs_of(request, [70, 71])[:1], refused]

    async def go() -> None:
        async with client_of(FakeBackend(failing), tmp_path) as client:
            asked = BODY | {"structured_outputs": {"regex": "a"}, "stream": True}
            reply = await client.post(URLS[1], json=asked)
            first, error, done = reply.text.split("\n\n")[:-1]
            assert '"choices"' in first
            assert (
                json.loads(error.removeprefix("data: "))["error"]["param"] == "structured_outputs"
            )
            assert done == "data: [DONE]"

    asyncio.run(go())


def test_ignore_eos_and_a_form_exclude_each_other(tmp_path: Path):
    async def go() -> None:
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            asked = BODY | {"ignore_eos": True, "response_format": {"type": "json_object"}}
            reply = await client.post(URLS[0], json=asked)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "ignore_eos")

    asyncio.run(go())


def test_all_choices_carry_the_form(tmp_path: Path):
    backend = FakeBackend(answering([70]))

    async def go() -> None:
        async with client_of(backend, tmp_path) as client:
            asked = {"prompt": ["a", "b"], "n": 2, "structured_outputs": {"choice": ["x", "y"]}}
            assert (await client.post(URLS[0], json=asked)).status_code == 200

    asyncio.run(go())
    assert [r.options.grammar for r in backend.requests] == [
        Grammar(GrammarKind.LARK, 'start: "x" | "y"')
    ] * 4

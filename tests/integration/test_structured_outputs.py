"""Structured output end to end: a schema in, valid JSON out, the same with drafts as without.

OpenAI's own client, the HTTP face, a real engine and real models; drafters guess the repetition of
what was said, nonsense, or what the schema forbids.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai
import pytest
import torch
from jsonschema import Draft202012Validator

from protos.exchange import Plan
from protos.tree import CandidateTree, chain
from tests.fakes import Source, random_source
from tests.integration.structured_house import House, house
from tests.tiny import tiny_llama_dir
from verifier_service.engine.ports import SequenceView

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"enum": ["old", "kind"]}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
    # A model of random weights would otherwise say little but spaces.
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True},
}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "A pet?"}], "max_tokens": 120}
MODES = ("off", "echo", "nonsense", "forbidden", "echo+nonsense+forbidden")
SAMPLING = ({"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"top_p": 0.8, "seed": 6})


class Echo:
    """Drafts what followed in the texts it was shown before: right when they come again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def learn(self, tokens: Sequence[int]) -> None:
        for at in range(4, len(tokens)):
            self._known[tuple(tokens[at - 4 : at])] = tokens[at]

    def __call__(self, view: SequenceView, plan: Plan) -> CandidateTree:
        path = list(view.tokens)
        while len(path) < len(view.tokens) + plan.depth and tuple(path[-4:]) in self._known:
            path.append(self._known[tuple(path[-4:])])
        return chain(path[len(view.tokens) :])


def constant(token: int) -> Source:
    """A chain of one id that no text of a schema may hold."""
    return lambda view, plan: chain([token] * plan.depth)


def sources_of(vocab_size: int) -> dict[str, Source]:
    return {"echo": Echo(), "nonsense": random_source(vocab_size), "forbidden": constant(1)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The tests' own tokenizer: single bytes and a few pairs."""
    directory = tiny_llama_dir(tmp_path_factory.mktemp("structured"))
    with house(directory, torch.float32, sources_of(384)) as made:
        yield made


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[House]:
    """Random weights, and the vocabulary of the embedded default."""
    path = tmp_path_factory.mktemp("wide")
    directory = tiny_llama_dir(path, vocab=49_152, hidden=32, layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_dir / name, directory / name)
    with house(directory, torch.float32, sources_of(49_152)) as made:
        yield made


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Iterator[House]:
    with house(smollm2_dir, torch.bfloat16, sources_of(49_152)) as made:
        yield made


HOUSES = ("tiny", "wide", "smollm2")


def speculating(mode: str) -> dict[str, object]:
    shape = {} if mode == "off" else {"width": 2, "depth": 6, "nodes": 12}
    return {"speculation": {"mode": mode} | shape, "return_token_ids": True}


@pytest.mark.parametrize("name", HOUSES)
def test_drafts_change_no_text_and_every_finished_text_is_valid(
    name: str, request: pytest.FixtureRequest
):
    built: House = request.getfixturevalue(name)
    echo = built.engine._drafting.drafters["echo"]
    samplings, modes = SAMPLING, MODES
    if name == "smollm2":  # `wide` samples from the same vocabulary, at a tenth of the time
        samplings, modes = SAMPLING[:1], (MODES[0], MODES[-1])

    async def talk(client: openai.AsyncOpenAI) -> None:
        num_finished = 0
        for sampling in samplings:
            said: dict[str, list[int]] = {}
            for mode in modes:
                reply = await client.chat.completions.create(
                    **CHAT, **sampling, response_format=FORMAT, extra_body=speculating(mode)
                )
                choice = reply.choices[0]
                said[mode] = choice.model_extra["token_ids"]
                if mode == "off":
                    echo.learn(said[mode])
                if choice.finish_reason == "stop":
                    value = json.loads(choice.message.content)
                    Draft202012Validator(SCHEMA).validate(value)
                    num_finished += 1
            assert said == dict.fromkeys(modes, said["off"])
        assert num_finished >= len(modes)

    before = built.engine.stats()
    built.ask(talk)
    after = built.engine.stats()
    accepted = dict(after.accepted_by_source)
    assert accepted["echo"] > 20
    assert "forbidden" not in accepted
    assert after.num_accepted - before.num_accepted > 20
    # Nonsense is dropped before it is verified, but for what the schema happens to allow.
    assert after.num_drafted - before.num_drafted < 2 * (after.num_accepted - before.num_accepted)


def test_a_stream_of_several_choices_is_json_piece_by_piece(tiny: House):
    async def talk(client: openai.AsyncOpenAI) -> None:
        asked = CHAT | {"n": 3, "seed": 8, "temperature": 1.2, "response_format": FORMAT}
        whole = await client.chat.completions.create(**asked, logprobs=True)
        texts, finishes = ["", "", ""], [None, None, None]
        stream = await client.chat.completions.create(**asked, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        assert texts == [choice.message.content for choice in whole.choices]
        assert finishes == [choice.finish_reason for choice in whole.choices]
        assert len(set(texts)) == 3
        for choice in whole.choices:
            assert choice.logprobs is not None
            if choice.finish_reason == "stop":
                Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content or ""))

    tiny.ask(talk)


@pytest.mark.parametrize(
    ("outputs", "matches"),
    [
        ({"regex": r"\d{3}-[ab]"}, lambda text: len(text) == 5 and text[3] == "-"),
        ({"choice": ['red "one"', "blue\n", "\u00e4\u20ac"]}, 'red "one"|blue\n|\u00e4\u20ac'),
        ({"grammar": 'start: "(" start ")" | "x"'}, lambda text: text.strip("()") == "x"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_forms_are_kept_too(tiny: House, outputs: dict, matches):
    async def talk(client: openai.AsyncOpenAI) -> None:
        for seed in range(4):
            reply = await client.completions.create(
                model="tiny",
                prompt="x",
                max_tokens=60,
                seed=seed,
                extra_body={"structured_outputs": outputs},
            )
            text = reply.choices[0].text
            if reply.choices[0].finish_reason == "stop":
                good = text in matches.split("|") if isinstance(matches, str) else matches(text)
                assert good, text
            else:
                assert outputs.keys() == {"grammar"}, text

    tiny.ask(talk)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_kept_is_a_400_in_the_users_words(tiny: House, stream: bool):
    async def talk(client: openai.AsyncOpenAI) -> None:
        broken = {"name": "x", "schema": {"type": "object", "not": {}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                **CHAT,
                stream=stream,
                response_format={"type": "json_schema", "json_schema": broken},
            )
        assert caught.value.param == "response_format"
        assert "not" in caught.value.message
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "("}}
            )
        assert caught.value.param == "structured_outputs"
        reply = await client.chat.completions.create(**CHAT, response_format=FORMAT, seed=1)
        assert reply.choices[0].message.content.startswith('{"name":"')

    tiny.ask(talk)
    tiny.engine.check_balance()


def test_parse_of_the_official_client_gives_a_value(tiny: House):
    from pydantic import BaseModel

    class Flag(BaseModel):
        is_set: bool

    async def talk(client: openai.AsyncOpenAI) -> None:
        num_parsed = 0
        for seed in range(3):
            reply = await client.chat.completions.parse(
                **CHAT, seed=seed, response_format=Flag, logit_bias={"223": -100}
            )
            if reply.choices[0].finish_reason == "stop":
                assert isinstance(reply.choices[0].message.parsed, Flag)
                num_parsed += 1
        assert num_parsed > 0

    tiny.ask(talk)

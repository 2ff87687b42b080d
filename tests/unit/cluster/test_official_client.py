"""OpenAI's own client over the whole surface, in process: replies, streams, its own errors."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import openai
import pytest

from cluster.http.ingress import Front, FrontSettings
from cluster.http.limits import Limits
from cluster.http.text import load_text
from protos.errors import Overloaded
from protos.generation import GenerationRequest
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, answering
from tests.unit.cluster.test_waiting import EndlessBackend

TOKENIZER = byte_tokenizer(VOCAB)
TEXT = "one. two 世界. three"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
Ask = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def visit(
    path: Path,
    ask: Ask,
    backend: FakeBackend | None = None,
    key: str = "k1",
    limits: Limits | None = None,
) -> None:
    """Run `ask` with a client wired straight into the application."""
    byte_tokenizer(VOCAB).save_pretrained(path)
    settings = FrontSettings(("tiny", "other"), keys=("k1",), limits=limits or Limits())
    front = Front(backend or FakeBackend(answering(IDS, 3)), load_text(path), settings)

    async def go() -> None:
        transport = httpx.ASGITransport(app=front.app(), raise_app_exceptions=False)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                base_url="http://test/v1", api_key=key, max_retries=0, http_client=http
            ) as client,
        ):
            await ask(client)

    asyncio.run(go())


def test_chat_whole_and_streamed_say_the_same(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        asked = CHAT | {"logprobs": True, "top_logprobs": 3, "n": 2, "seed": 4}
        whole = await client.chat.completions.create(**asked)
        assert [choice.message.content for choice in whole.choices] == [TEXT, TEXT]
        assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * len(IDS)
            joined = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
            assert joined.decode() == TEXT
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 2 * len(IDS)
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        texts, roles, usage = ["", ""], [0, 0], None
        async for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role == "assistant"
        assert (texts, roles) == ([TEXT, TEXT], [1, 1])
        assert usage is not None
        assert usage.total_tokens == whole.usage.total_tokens

    visit(tmp_path, ask)


def test_completions_of_every_form_with_stops_and_log_probabilities(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        many = await client.completions.create(
            model="tiny", prompt=["a", "b"], logprobs=2, echo=True
        )
        assert [choice.text for choice in many.choices] == [f"a{TEXT}", f"b{TEXT}"]
        values = many.choices[0].logprobs
        assert values is not None
        assert values.token_logprobs is not None
        assert values.token_logprobs[0] is None
        assert len(values.token_logprobs) == 1 + len(IDS)
        ids = await client.completions.create(model="tiny", prompt=[5, 6], stop=[". two"])
        assert (ids.choices[0].text, ids.choices[0].finish_reason) == ("one", "stop")
        lists = await client.completions.create(model="other", prompt=[[5], [6, 7]], n=2)
        assert [choice.index for choice in lists.choices] == [0, 1, 2, 3]
        assert lists.model == "other"
        assert lists.usage is not None
        assert lists.usage.prompt_tokens == 3
        stream = await client.completions.create(model="tiny", prompt="a", stream=True, stop="世界")
        assert "".join([c.choices[0].text async for c in stream]) == "one. two "

    visit(tmp_path, ask)


def test_our_own_fields_go_through_extra_body(tmp_path: Path) -> None:
    backend = FakeBackend(answering(IDS))

    async def ask(client: openai.AsyncOpenAI) -> None:
        extra = {"top_k": 7, "min_p": 0.1, "speculation": {"mode": "off"}, "return_token_ids": True}
        reply = await client.chat.completions.create(**CHAT, extra_body=extra)
        assert reply.choices[0].model_extra is not None
        assert reply.choices[0].model_extra["token_ids"] == IDS
        assert reply.model_extra is not None
        assert reply.model_extra["metrics"]["speculative_decoding"]["num_rounds"] == len(IDS)

    visit(tmp_path, ask, backend)
    assert backend.requests[0].params.top_k == 7


def test_models_are_listed_and_looked_up(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["tiny", "other"]
        assert (await client.models.retrieve("other")).id == "other"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")

    visit(tmp_path, ask)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REFUSALS: list[tuple[dict[str, object], type[openai.APIStatusError], str | None]] = [
    ({"model": "nope"}, openai.NotFoundError, "model"),
    ({"tools": [TOOL]}, openai.BadRequestError, "tools"),
    ({"tools": [TOOL], "stream": True}, openai.BadRequestError, "tools"),
    ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions"),
    ({"temperature": 3.0}, openai.BadRequestError, "temperature"),
    ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "logit_bias"),
    ({"n": 0}, openai.BadRequestError, "n"),
    ({"modalities": ["audio"]}, openai.BadRequestError, "modalities"),
    ({"reasoning_effort": "high"}, openai.BadRequestError, "reasoning_effort"),
    ({"store": True}, openai.BadRequestError, "store"),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, openai.BadRequestError, "messages"),
]


@pytest.mark.parametrize(("fields", "kind", "param"), REFUSALS)
def test_refusals_are_its_own_exceptions(
    tmp_path: Path,
    fields: dict[str, object],
    kind: type[openai.APIStatusError],
    param: str | None,
) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**(CHAT | fields))  # type: ignore[call-overload]
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"

    visit(tmp_path, ask)


def test_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(**CHAT)
        assert caught.value.code == "invalid_api_key"

    visit(tmp_path, ask, key="wrong")


def test_overload_and_faults_are_server_errors(tmp_path: Path) -> None:
    def refuse(request: GenerationRequest) -> list[Exception]:
        return [Overloaded("full", 3.0)]

    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**CHAT)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "3"

    visit(tmp_path, ask, FakeBackend(refuse))


def test_it_tries_again_after_an_overload(tmp_path: Path) -> None:
    tried: list[str] = []

    def script(request: GenerationRequest) -> object:
        tried.append(request.request_id)
        return [Overloaded("full", 0.0)] if len(tried) == 1 else answering(IDS)(request)

    async def ask(client: openai.AsyncOpenAI) -> None:
        patient = client.with_options(max_retries=1)
        reply = await patient.chat.completions.create(**CHAT)
        assert reply.choices[0].message.content == TEXT

    visit(tmp_path, ask, FakeBackend(script))  # type: ignore[arg-type]
    assert len(tried) == 2


def test_a_deadline_ends_a_call_and_a_stream_with_its_own_errors(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**CHAT)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError) as told:
            async for _ in stream:
                pass
        assert told.value.type == "timeout_error"

    backend = EndlessBackend()
    visit(tmp_path, ask, backend, limits=Limits(timeout_s=0.05))
    assert backend.num_open == 0


def test_a_stream_that_is_left_is_closed(tmp_path: Path) -> None:
    backend = FakeBackend(answering(IDS))

    async def ask(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        async with stream:
            async for _ in stream:
                break

    visit(tmp_path, ask, backend)
    assert backend.num_open == 0


def test_raw_replies_are_what_the_client_reads(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        raw = await client.chat.completions.with_raw_response.create(**CHAT)
        body = json.loads(raw.text if isinstance(raw.text, str) else raw.text())
        assert set(body) == {
            "id",
            "object",
            "created",
            "model",
            "system_fingerprint",
            "choices",
            "usage",
            "metrics",
        }

    visit(tmp_path, ask)

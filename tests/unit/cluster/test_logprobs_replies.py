"""Log probabilities and several choices in OpenAI's shapes: streamed, whole, echoed, cut."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.http.logprobs import LOWEST, TokenWriter, logprobs_json
from cluster.http.text import load_text
from protos.counter import derived_seed
from protos.generation import GenerationRequest, TokenLogprobs, TokenRun
from protos.token_bytes import bytes_of_entries
from tests.tiny import SPECIALS, byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, client_of, runs_of

TOKENIZER = byte_tokenizer(VOCAB)
TEXT = "Grüße, 世 ab!"


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def value_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Something that says which id it belongs to."""
    top = tuple(((token_id + i) % VOCAB, -0.5 * i) for i in range(num_top))
    return TokenLogprobs(-token_id / 8, top)


def saying(text_of: Callable[[GenerationRequest], str], run_len: int = 3) -> FakeBackend:
    def script(request: GenerationRequest) -> list[TokenRun]:
        runs = runs_of(request, ids_of(text_of(request)), run_len, 4)
        num, num_prompt = request.num_logprobs, request.num_prompt_logprobs
        if num is not None:
            runs = [replace(r, logprobs=tuple(value_of(i, num) for i in r.ids)) for r in runs]
        if num_prompt is not None:
            found = tuple(value_of(i, num_prompt) for i in request.prompt_ids[1:])
            runs[0] = replace(runs[0], prompt_logprobs=found)
        return runs

    return FakeBackend(script)


def post(backend: FakeBackend, path: Path, url: str, body: dict) -> dict:
    async def go() -> dict:
        async with client_of(backend, path) as client:
            reply = await client.post(url, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

    return asyncio.run(go())


def stream(backend: FakeBackend, path: Path, url: str, body: dict) -> list[dict]:
    async def go() -> list[dict]:
        async with client_of(backend, path) as client:
            reply = await client.post(url, json=body | {"stream": True})
            lines = [line for line in reply.text.split("\n\n") if line]
            assert lines[-1] == "data: [DONE]"
            return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    return asyncio.run(go())


def joined(parts: list[dict]) -> dict:
    whole: dict[str, list] = {}
    for part in parts:
        for name, values in part.items():
            if values is not None:
                whole.setdefault(name, []).extend(values)
    return whole


@pytest.mark.parametrize("run_len", [1, 4, 100])
@pytest.mark.parametrize("echo", [False, True])
def test_completions_show_tokens_that_join_to_the_text(tmp_path: Path, run_len: int, echo: bool):
    body = {"prompt": "añb", "logprobs": 2, "echo": echo, "return_token_ids": True}
    backend = saying(lambda r: TEXT, run_len)
    choice = post(backend, tmp_path, "/v1/completions", body)["choices"][0]
    shown = choice["logprobs"]
    ids = ids_of("añb") * echo + ids_of(TEXT)
    assert choice["text"] == "añb" * echo + TEXT
    expected: list[float | None] = [value_of(i, 2).logprob for i in ids]
    if echo:
        expected[0] = None
        assert shown["top_logprobs"][0] is None
    assert shown["token_logprobs"] == expected
    assert [shown["text_offset"][0], shown["text_offset"][-1]] == [0, len(choice["text"]) - 1]
    whole = "".join(t for t in shown["tokens"] if not t.startswith("bytes:"))
    assert whole == "".join(c for c in choice["text"] if c.isascii())
    for at, token, top in zip(
        shown["text_offset"], shown["tokens"], shown["top_logprobs"], strict=True
    ):
        assert token.startswith("bytes:") or choice["text"].startswith(token, at)
        assert top is None or (token in top and 2 <= len(top) <= 3)
    chunks = stream(backend, tmp_path, "/v1/completions", body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert joined(parts) == shown
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    for chunk in chunks:
        here = chunk["choices"][0]
        num_echoed = len(ids_of("añb")) * (echo and chunk is chunks[0])
        assert len(here["logprobs"]["tokens"]) == len(here["token_ids"]) + num_echoed


@pytest.mark.parametrize("run_len", [1, 100])
def test_chats_show_tokens_with_their_bytes(tmp_path: Path, run_len: int):
    user = [{"role": "user", "content": "hi"}]
    body = {"messages": user, "logprobs": True, "top_logprobs": 3}
    backend = saying(lambda r: TEXT, run_len)
    choice = post(backend, tmp_path, "/v1/chat/completions", body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == TEXT
    ids = ids_of(TEXT)
    assert [entry["logprob"] for entry in content] == [value_of(i, 3).logprob for i in ids]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    chunks = stream(backend, tmp_path, "/v1/chat/completions", body)
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [entry for part in parts for entry in part] == content
    plain = post(backend, tmp_path, "/v1/chat/completions", body | {"top_logprobs": None})
    assert all(e["top_logprobs"] == [] for e in plain["choices"][0]["logprobs"]["content"])


def test_a_request_that_does_not_ask_gets_null(tmp_path: Path):
    backend = saying(lambda r: TEXT)
    reply = post(backend, tmp_path, "/v1/completions", {"prompt": "x", "echo": True})
    assert reply["choices"][0]["logprobs"] is None
    assert reply["choices"][0]["text"] == "x" + TEXT
    assert backend.requests[-1].num_logprobs is None
    assert backend.requests[-1].num_prompt_logprobs is None


def test_a_stop_string_cuts_tokens_ids_and_usage_alike(tmp_path: Path):
    body = {"prompt": "x", "logprobs": 0, "stop": [". th"], "return_token_ids": True}
    reply = post(saying(lambda r: "one. two. three. four", 7), tmp_path, "/v1/completions", body)
    choice = reply["choices"][0]
    assert choice["text"] == "one. two"
    num = reply["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == num
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [token] for token in choice["logprobs"]["tokens"]
    ]


def test_a_verifier_that_leaves_out_values_is_not_believed(tmp_path: Path):
    async def go() -> int:
        backend = FakeBackend(lambda r: runs_of(r, ids_of("abc")))
        async with client_of(backend, tmp_path) as client:
            body = {"prompt": "x", "logprobs": 1}
            return (await client.post("/v1/completions", json=body)).status_code

    assert asyncio.run(go()) == 503


def names(request: GenerationRequest) -> str:
    return f"<{request.params.seed % 1000}>"


def test_choices_use_the_seed_and_seeds_derived_from_it(tmp_path: Path):
    backend = saying(names)
    body = {"prompt": ["ab", "cde"], "n": 3, "seed": 11}
    reply = post(backend, tmp_path, "/v1/completions", body)
    seeds = [derived_seed(11, choice) for choice in range(3)]
    assert seeds[0] == 11
    assert [r.params.seed for r in backend.requests] == seeds * 2
    assert [r.prompt_ids for r in backend.requests] == [tuple(ids_of("ab"))] * 3 + [
        tuple(ids_of("cde"))
    ] * 3
    assert [c["index"] for c in reply["choices"]] == list(range(6))
    assert [c["text"] for c in reply["choices"]] == [f"<{seed % 1000}>" for seed in seeds * 2]


def test_usage_counts_a_prompt_once_and_all_choices(tmp_path: Path):
    backend = saying(names)
    reply = post(backend, tmp_path, "/v1/completions", {"prompt": ["ab", "cde"], "n": 3, "seed": 1})
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(ids_of("ab")) + len(ids_of("cde"))
    written = sum(len(ids_of(choice["text"])) for choice in reply["choices"])
    assert usage["completion_tokens"] == written
    assert usage["total_tokens"] == usage["prompt_tokens"] + written


def test_choices_without_a_seed_still_differ_from_each_other(tmp_path: Path):
    backend = saying(names)
    post(backend, tmp_path, "/v1/completions", {"prompt": "ab", "n": 4})
    first = backend.requests[0].params.seed
    assert [r.params.seed for r in backend.requests] == [derived_seed(first, i) for i in range(4)]


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_choices_join_by_index_to_the_whole_ones(tmp_path: Path, url: str):
    is_chat = "chat" in url
    user = [{"role": "user", "content": "hi"}]
    body = ({"messages": user} if is_chat else {"prompt": "hi"}) | {"n": 3, "seed": 5}
    body |= {"logprobs": True} if is_chat else {"logprobs": 0, "echo": True}
    backend = saying(names, 1)
    whole = post(backend, tmp_path, url, body)["choices"]
    chunks = stream(backend, tmp_path, url, body | {"stream_options": {"include_usage": True}})
    texts = ["", "", ""]
    num_tokens, ends = [0, 0, 0], [0, 0, 0]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        at = choice["index"]
        texts[at] += choice["delta"].get("content", "") if is_chat else choice["text"]
        num_tokens[at] += len(choice["logprobs"]["content" if is_chat else "tokens"])
        ends[at] += choice["finish_reason"] is not None
    assert ends == [1, 1, 1]
    shown = [c["message"]["content"] if is_chat else c["text"] for c in whole]
    assert texts == shown
    assert len(set(texts)) == 3
    kind = "content" if is_chat else "tokens"
    assert num_tokens == [len(c["logprobs"][kind]) for c in whole]
    assert chunks[-1]["usage"]["completion_tokens"] == sum(
        len(ids_of(text.removeprefix("hi"))) for text in texts
    )


def test_single_tokens_of_a_byte_level_vocabulary_join_to_the_text(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path)
    bytes_of = load_text(tmp_path).bytes_of
    text = "".join(map(chr, range(1, 0x250))) + "世🌍 ab"
    assert b"".join(bytes_of(i).data for i in ids_of(text)).decode() == text
    special = bytes_of(TOKENIZER.convert_tokens_to_ids(SPECIALS[0]))
    assert (special.shown, special.is_text) == (SPECIALS[0], False)


def test_tokens_of_a_sentencepiece_vocabulary_have_spaces_and_lone_bytes():
    vocabulary = ["<s>", "\u2581the", "<0xE4>", "é", "<0xE4>x"]
    bytes_of = bytes_of_entries(
        lambda i: vocabulary[i] if i < len(vocabulary) else None,
        frozenset((0,)),
        {0: "<s>"},
        byte_level=False,
    )
    assert [bytes_of(i).data for i in range(6)] == [
        b"<s>",
        b" the",
        b"\xe4",
        "é".encode(),
        b"<0xE4>x",
        b"",
    ]
    assert bytes_of(2).shown == "bytes:\\xe4"
    assert [bytes_of(i).is_text for i in range(2)] == [False, True]


def test_probability_zero_is_said_without_infinity():
    bytes_of = bytes_of_entries(lambda i: "ab"[i], frozenset(), {}, byte_level=True)
    value = TokenLogprobs(float("-inf"), ((0, 0.0), (1, float("-inf"))))
    for kind in ("chat", "completion"):
        shown = logprobs_json(kind, TokenWriter(bytes_of).write([1], [value]))
        assert str(LOWEST) in json.dumps(shown, allow_nan=False)

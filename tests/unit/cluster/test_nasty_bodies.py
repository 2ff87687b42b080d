"""Bodies made to break parsers: a short 400 that shows nothing of the inside, and life after it."""

import asyncio
import pickle
import re
from itertools import product
from pathlib import Path

import pytest

from tests.unit.cluster.http_fakes import FakeBackend, answering, client_of

MAX_REPLY_BYTES = 2048
LEAKS = re.compile(
    r"Traceback|\.py\b|/home|/work|/usr|site-packages|pydantic|jiter|starlette|protos\.|cluster\."
    r"|ray\.|Request\b(?!s)|Options\b|object at 0x|[A-Z][a-z]+Error"
)

DEEP = b"[" * 20_000 + b"]" * 20_000
DEEP_OBJECTS = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
HUGE = b"9" * 100_000
LONG = b'"' + b"n" * 300_000 + b'"'
NOT_JSON = {
    "deep lists": DEEP,
    "deep objects": DEEP_OBJECTS,
    "not closed": b"[" * 50_000,
    "nan": b"NaN",
    "infinity": b"-Infinity",
    "half a surrogate": b'"\\ud83d"',
    "the other half": b'"\\udcf0 x"',
    "surrogates swapped": b'"\\udcf0\\ud83d"',
    "invalid utf-8": b'"\xff\xfe"',
    "overlong utf-8": b'"\xc0\xaf"',
    "utf-16": '{"a": "b"}'.encode("utf-16"),
    "control character": b'"a\x01b"',
    "bad escape": b'"\\x41"',
    "two values": b"1} {",
    "leading zero": b"007",
    "hex": b"0x10",
    "comment": b"1 /* one */",
    "trailing comma": b"[1,]",
}
"""Wherever it stands in a body, this is no JSON, or deeper than anybody needs."""
NUMBERS_OF_PYTHON = (b"NaN", b"-Infinity")
"""What Python's clients write for them passes where nobody looks at it."""

WRONG_VALUES = {
    "huge number": HUGE,
    "nan": b"NaN",
    "infinity": b"-Infinity",
    "huge float": b"1e99999",
    "huge negative": b"-" + HUGE,
    "long text": LONG,
    "many items": b"[" + b"1," * 100_000 + b"{}]",
    "many kinds": b'[null,true,"a",1.5,[],{}' + b",{}" * 5000 + b"]",
    "long key": b"{" + LONG + b": [1]}",
    "many keys": b"{" + b",".join(b'"%d": "x"' % i for i in range(5000)) + b"}",
    "text": b'"x"',
}
FIELDS = {
    "/v1/completions": ("temperature", "n", "logit_bias", "stop_token_ids", "speculation"),
    "/v1/chat/completions": ("messages", "max_tokens", "stream_options", "top_logprobs"),
    "/tokenize": ("messages", "add_special_tokens"),
    "/detokenize": ("tokens",),
}
GOOD = {
    "/v1/completions": b'"prompt": "x"',
    "/v1/chat/completions": b'"messages": [{"role": "user", "content": "x"}]',
    "/tokenize": b'"model": "tiny"',
    "/detokenize": b'"model": "tiny"',
}


def bodies(url: str) -> list[tuple[str, bytes]]:
    """(what it is, body) of everything that must be refused."""
    good = GOOD[url]
    made = list(NOT_JSON.items())
    made += [
        (f"{name} in an unknown field", b'{%s, "z": %s}' % (good, bad))
        for name, bad in NOT_JSON.items()
        if bad not in NUMBERS_OF_PYTHON
    ]
    for field, (name, value) in product(FIELDS[url], WRONG_VALUES.items()):
        rest = b"" if field == "messages" else good + b","
        made.append((f"{name} as {field}", b'{%s "%s": %s}' % (rest, field.encode(), value)))
    made.append(("a long key", b"{%s: %s}" % (LONG, b"}")))
    made.append(("the last of two counts", b'{%s, "n": 1, "n": 0, "model": 1}' % good))
    return made


@pytest.mark.parametrize("url", FIELDS)
def test_a_nasty_body_is_a_short_400_that_shows_nothing(tmp_path: Path, url: str) -> None:
    async def go() -> list[str]:
        wrong: list[str] = []
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            for name, body in bodies(url):
                reply = await client.post(url, content=body)
                error = reply.json().get("error", {})
                leak = LEAKS.search(reply.text)
                if reply.status_code != 400 or set(error) != {"message", "type", "param", "code"}:
                    wrong.append(f"{name}: {reply.status_code} {reply.text[:100]}")
                elif len(reply.content) > MAX_REPLY_BYTES or leak:
                    wrong.append(f"{name}: {len(reply.content)} bytes: {reply.text[:200]}")
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        return wrong

    assert asyncio.run(go()) == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud83d\\ude00 \xf0\x9f\x98\x80"}',
        b'{"prompt": "\\u0000"}',
        b'{"prompt": "a", "prompt": "x"}',
        b'{"prompt": "x", "z": ' + LONG + b"}",
        b'{"prompt": "x", "z": [NaN, 1' + b"0" * 400 + b"]}",
        b' \n{"prompt": "x"}\n ',
    ],
)
def test_odd_bodies_that_are_right_are_served(tmp_path: Path, body: bytes) -> None:
    async def go() -> None:
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            assert (await client.post("/v1/completions", content=body)).status_code == 200

    asyncio.run(go())


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("url", FIELDS)
def test_a_pickle_runs_nothing(tmp_path: Path, url: str) -> None:
    async def go() -> None:
        trap = pickle.dumps(Trap(tmp_path / "sprung"))
        async with client_of(FakeBackend(answering([70])), tmp_path) as client:
            for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
                headers = {"Content-Type": kind, "X-Request-Id": "x"}
                reply = await client.post(url, content=trap, headers=headers)
                assert reply.status_code == 400
        assert not (tmp_path / "sprung").exists()

    asyncio.run(go())

"""API keys from a stranger's side, and from a named source that holds none."""

import asyncio
from pathlib import Path

import httpx
import pytest

from cluster.http.auth import check_key, load_keys
from cluster.http.ingress import FrontSettings
from protos.errors import ConfigError, Unauthenticated
from tests.unit.cluster.http_fakes import FakeBackend, answering, client_of

KEYS = ("first-key", "schlüssel")
WRONG = {
    "nothing": None,
    "empty": b"",
    "only the scheme": b"Bearer",
    "scheme and blank": b"Bearer  ",
    "a wrong key": b"Bearer nope",
    "no scheme": b"first-key",
    "another scheme": b"Basic first-key",
    "the key's beginning": b"Bearer first-ke",
    "the key and more": b"Bearer first-key2",
    "another case": b"Bearer FIRST-KEY",
    "both at once": b"Bearer first-key,schl\xc3\xbcssel",
    "two words": b"Bearer first-key first-key",
    "not ASCII": "Bearer fürst-key".encode(),
    "no UTF-8": b"Bearer \xff\xfe",
    "very long": b"Bearer " + b"x" * 20_000,
}
GUARDED = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_a_stranger_gets_in_nowhere(tmp_path: Path, given: bytes | None) -> None:
    async def go() -> None:
        backend = FakeBackend(answering([70]))
        async with client_of(backend, tmp_path, FrontSettings(("tiny",), KEYS)) as client:
            headers = {} if given is None else {b"Authorization": given}
            for method, path in GUARDED:
                # A body that nobody would take: the key is asked for before it is read.
                reply = await client.request(method, path, headers=headers, content=b"{")
                assert reply.status_code == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.json()["error"]["code"] == "invalid_api_key"
                assert "first" not in reply.text
            for path in ("/health", "/ping", "/version", "/metrics", "/openapi.json"):
                assert (await client.get(path, headers=headers)).status_code == 200
        assert backend.requests == []

    asyncio.run(go())


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_every_key_opens_in_any_spelling_of_the_scheme(
    tmp_path: Path, key: str, scheme: str
) -> None:
    async def go() -> httpx.Response:
        settings = FrontSettings(("tiny",), KEYS)
        async with client_of(FakeBackend(answering([70])), tmp_path, settings) as client:
            headers = {b"Authorization": f"{scheme} {key}".encode()}
            return await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)

    assert asyncio.run(go()).status_code == 200


def test_no_keys_no_question() -> None:
    check_key(None, ())
    with pytest.raises(Unauthenticated):
        check_key(None, ("",))


def test_keys_come_from_a_variable_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeffthree\n# ours\n\n  # not a key\n  four  \n", encoding="utf-8")
    environ = {"KEYS": " one, two ,"}
    assert load_keys("KEYS", str(file), environ) == ("one", "two", "three", "four")
    assert load_keys(None, None, environ) == ()


@pytest.mark.parametrize(
    ("variable", "content", "named"),
    [
        ("ABSENT", None, "ABSENT"),
        ("EMPTY", None, "EMPTY"),
        ("BLANK", None, "BLANK"),
        (None, "# nothing\n\n", "api_keys_file"),
        (None, "", "api_keys_file"),
    ],
)
def test_a_named_source_without_a_key_is_refused(
    tmp_path: Path, variable: str | None, content: str | None, named: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=named):
        load_keys(variable, str(file) if content is not None else None, {"EMPTY": "", "BLANK": ","})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xff\xfek\x00")
    for name in ("keys", "nowhere"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_keys(None, str(tmp_path / name))

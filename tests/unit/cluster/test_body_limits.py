"""Reading a body: the bound holds whatever Content-Length says, and odd lengths say nothing."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.http.limits import BodyTooLarge, read_body


async def _chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("declared", [None, "", "3", "0", "²", "9" * 5000, "-1", "1e9", "٣"])
def test_a_small_body_is_read_whatever_odd_length_was_declared(declared: str | None) -> None:
    assert asyncio.run(read_body(_chunks(b"ab", b"c"), declared, 10)) == b"abc"


@pytest.mark.parametrize("declared", [None, "1", "²"])
def test_a_long_body_is_refused_whatever_was_declared(declared: str | None) -> None:
    with pytest.raises(BodyTooLarge):
        asyncio.run(read_body(_chunks(b"abcdef", b"ghijkl"), declared, 10))


def test_a_declared_length_is_refused_unread() -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    with pytest.raises(BodyTooLarge):
        asyncio.run(read_body(never(), "11", 10))

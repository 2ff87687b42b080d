"""host:port taken apart and put together."""

import pytest

from protos.address import join_address, split_address
from protos.errors import ConfigError

ADDRESSES = [
    ("127.0.0.1:80", ("127.0.0.1", 80)),
    ("[::1]:0", ("::1", 0)),
    ("localhost:0", ("localhost", 0)),
    ("host:65535", ("host", 65535)),
]


@pytest.mark.parametrize(("text", "parts"), ADDRESSES)
def test_an_address_is_split_at_its_last_colon_and_joined_again(text: str, parts: tuple[str, int]):
    assert split_address(text) == parts
    assert join_address(*parts) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "8000", ":80", "host:", "host:x", "host:65536", "host:70000", "host:-1", "[]:1"],
)
def test_what_is_no_host_and_port_is_refused(text: str):
    with pytest.raises(ConfigError, match="host:port"):
        split_address(text)

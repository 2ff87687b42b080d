"""Channels: what is refused without token, TLS or on purpose, and errors both ways."""

import asyncio

import grpc
import pytest

from protos import drafting_pb2_grpc as rpc
from protos import errors
from protos.channel import (
    CLIENT_OPTIONS,
    MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    VERIFIER_ID_KEY,
    Security,
    TlsFiles,
    bind,
    call_metadata,
    is_loopback,
    make_aio_channel,
    make_aio_server,
    verifier_id_of,
)
from protos.channel_errors import abort, error_from_rpc, status_of
from protos.describe_codec import encode_describe_request, encode_description
from protos.exchange import Capabilities, DrafterLoad, PlanKind
from tests.certificates import Authority

OPEN = Security()


class Describer(rpc.DrafterServicer):
    """Answers Describe, or fails as told."""

    def __init__(self, error=None):
        self.error = error

    async def Describe(self, request, context):  # noqa: N802
        if self.error is not None:
            await abort(context, self.error)
        record = Capabilities("fake", "fake", 1, (PlanKind.CHAIN,))
        return encode_description(record, DrafterLoad())


async def describe(serving, calling, error=None):
    """One call over loopback; returns the response or raises the mapped error."""
    server = make_aio_server(serving)
    rpc.add_DrafterServicer_to_server(Describer(error), server)
    port = bind(server, "127.0.0.1", 0, serving)
    await server.start()
    try:
        async with make_aio_channel(f"localhost:{port}", calling) as channel:
            stub = rpc.DrafterStub(channel)
            return await stub.Describe(
                encode_describe_request(), metadata=call_metadata(calling), timeout=10
            )
    except grpc.RpcError as failed:
        raise error_from_rpc(failed) from failed
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_loopback_is_told_from_the_rest(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_nothing_listens_beyond_loopback_with_neither_token_nor_tls(host):
    async def attempt():
        server = make_aio_server(OPEN)
        with pytest.raises(errors.ConfigError, match="token or TLS"):
            bind(server, host, 0, OPEN)

    asyncio.run(attempt())


@pytest.mark.parametrize("security", [Security(token="t"), Security(insecure=True)])
def test_a_token_or_a_word_lets_it_listen_beyond(security):
    async def attempt():
        server = make_aio_server(security)
        assert bind(server, "0.0.0.0", 0, security) > 0
        await server.stop(0)

    asyncio.run(attempt())


def test_a_port_in_use_is_a_config_error():
    async def attempt():
        first, second = make_aio_server(OPEN), make_aio_server(OPEN)
        port = bind(first, "127.0.0.1", 0, OPEN)
        with pytest.raises(errors.ConfigError, match="cannot listen"):
            bind(second, "127.0.0.1", port, OPEN)
        await first.stop(0)

    asyncio.run(attempt())


@pytest.mark.parametrize("token", ["a b\n", "schlüssel", "\x00"])
def test_tokens_are_printable_ascii(token):
    with pytest.raises(errors.ConfigError):
        Security(token=token)


def test_a_token_is_never_shown():
    assert "hush" not in repr(Security(token="hush"))


def test_metadata_names_the_verifier():
    pairs = call_metadata(Security(token="t"), 0xAB)
    assert pairs == (("authorization", "Bearer t"), (VERIFIER_ID_KEY, "00000000000000ab"))
    assert verifier_id_of(pairs) == 0xAB


@pytest.mark.parametrize("value", ["", "ab", "x" * 16, "0" * 17, b"0" * 16])
def test_a_stream_without_an_owner_is_refused(value):
    with pytest.raises(errors.Unauthenticated):
        verifier_id_of(((VERIFIER_ID_KEY, value),))
    with pytest.raises(errors.Unauthenticated):
        verifier_id_of(None)


def test_both_ends_agree_on_limits_and_pings():
    client, server = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    for side in (client, server):
        assert side["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES
        assert side["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
        assert side["grpc.keepalive_permit_without_calls"] == 1
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] > allowed_ms
    assert client["grpc.max_reconnect_backoff_ms"] <= 1000


def test_the_right_token_is_served_and_others_are_not():
    right = Security(token="right")
    assert asyncio.run(describe(right, right)).kind == "fake"
    for wrong in (Security(), Security(token="wrong"), Security(token="righ")):
        with pytest.raises(errors.Unauthenticated):
            asyncio.run(describe(right, wrong))


ERRORS = [
    errors.InvalidRequest("no", "temperature"),
    errors.InvalidRequest("no"),
    errors.ContextTooLong("no", "prompt_ids"),
    errors.UnknownModel("no"),
    errors.Overloaded("no", 2.5),
    errors.Cancelled("no"),
    errors.DeadlineExceeded("no"),
    errors.ConfigError("no"),
    errors.IncompatiblePair("no"),
    errors.ProtocolError("no"),
    errors.MalformedRows("no"),
    errors.VersionMismatch("no"),
    errors.PeerUnavailable("no"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_arrives_as_the_error_that_was_raised(error):
    with pytest.raises(type(error)) as caught:
        asyncio.run(describe(OPEN, OPEN, error))
    assert type(caught.value) is type(error)
    assert str(caught.value) == "no"
    for name in ("param", "retry_after_s"):
        assert getattr(caught.value, name, None) == getattr(error, name, None)


def test_an_unforeseen_error_says_nothing():
    code, text, _ = status_of(KeyError("secret path"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in text


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """Files of a peer that our authority signed, and of one that another one did."""
    folder = tmp_path_factory.mktemp("tls")
    return {name: Authority(folder / name).peer("peer") for name in ("ours", "strangers")}


def test_mutual_tls_serves_its_own(tls):
    ours = Security(tls=tls["ours"])
    assert asyncio.run(describe(ours, ours)).kind == "fake"


def test_mutual_tls_refuses_strangers_and_plain_text(tls):
    ours = Security(tls=tls["ours"])
    for stranger in (Security(tls=tls["strangers"]), OPEN):
        with pytest.raises(errors.PeerUnavailable):
            asyncio.run(describe(ours, stranger))


def test_missing_tls_files_are_a_config_error(tmp_path):
    missing = TlsFiles(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    with pytest.raises(errors.ConfigError):
        asyncio.run(describe(Security(tls=missing), OPEN))

"""A real gRPC server as a stranger meets it: token and certificates, those of Ray's included."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos import drafting_pb2_grpc as rpc
from protos.channel import (
    CLIENT_OPTIONS,
    Security,
    TlsFiles,
    bind,
    call_metadata,
    make_aio_channel,
    make_aio_server,
    tls_of_environment,
    trust,
)
from protos.channel_errors import error_from_rpc
from protos.describe_codec import encode_describe_request, encode_description
from protos.errors import ConfigError, PeerUnavailable, Unauthenticated
from protos.exchange import Capabilities, DrafterLoad, PlanKind
from tests.certificates import Authority

TOKEN = "right-token"


class Describer(rpc.DrafterServicer):
    """Answers Describe and counts how often it was reached."""

    num_calls = 0

    async def Describe(self, request, context):  # noqa: N802
        self.num_calls += 1
        record = Capabilities("fake", "fake", 1, (PlanKind.CHAIN,))
        return encode_description(record, DrafterLoad())


def environment(files: TlsFiles) -> dict[str, str]:
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(files.authority),
        "RAY_TLS_SERVER_CERT": str(files.certificate),
        "RAY_TLS_SERVER_KEY": str(files.key),
    }


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    folder = tmp_path_factory.mktemp("tls")
    return Authority(folder / "ours"), Authority(folder / "theirs")


def without_certificate(address: str, files: TlsFiles) -> grpc.aio.Channel:
    """Trusts the right authority and shows nothing of its own."""
    credentials = grpc.ssl_channel_credentials(files.authority.read_bytes())
    return grpc.aio.secure_channel(address, credentials, CLIENT_OPTIONS)


def test_only_the_right_token_and_the_right_certificate_reach_the_service(
    authorities: tuple[Authority, Authority],
) -> None:
    ours, theirs = authorities
    files = tls_of_environment(environment(ours.peer("server")))
    assert files is not None
    own, foreign = ours.peer("client"), theirs.peer("client")
    # Trusts the server, so that only its own certificate can be at fault.
    mixed = TlsFiles(own.authority, foreign.certificate, foreign.key)
    serving = Security(TOKEN, files)
    right = call_metadata(serving)
    wrong = (
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", f"Bearer {TOKEN[:-1]}"),),
        (("authorization", f"Bearer {TOKEN}x"),),
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization-bin", TOKEN.encode()),),
    )

    async def call(channel: grpc.aio.Channel, metadata: tuple) -> None:
        stub = rpc.DrafterStub(channel)
        try:
            await stub.Describe(encode_describe_request(), metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    async def go() -> None:
        service = Describer()
        server = make_aio_server(serving)
        rpc.add_DrafterServicer_to_server(service, server)
        address = f"localhost:{bind(server, '127.0.0.1', 0, serving)}"
        await server.start()
        try:
            for metadata in wrong:
                async with make_aio_channel(address, Security(TOKEN, own)) as channel:
                    with pytest.raises(Unauthenticated):
                        await call(channel, metadata)
            for channel in (
                make_aio_channel(address, Security(TOKEN)),
                make_aio_channel(address, Security(TOKEN, foreign)),
                make_aio_channel(address, Security(TOKEN, mixed)),
                without_certificate(address, own),
            ):
                async with channel:
                    with pytest.raises(PeerUnavailable):
                        await call(channel, right)
            assert service.num_calls == 0, "a stranger was let in"
            async with make_aio_channel(address, Security(TOKEN, own)) as channel:
                await call(channel, right)
            assert service.num_calls == 1
        finally:
            await server.stop(0)

    asyncio.run(go())


@pytest.mark.parametrize("value", ["", "0", "false", "no"])
def test_without_rays_tls_its_files_are_not_taken(tmp_path: Path, value: str) -> None:
    files = TlsFiles(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert tls_of_environment(environment(files) | {"RAY_USE_TLS": value}) is None
    assert tls_of_environment({}) is None


@pytest.mark.parametrize(
    "missing", ["RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"]
)
def test_a_variable_that_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    values = environment(TlsFiles(tmp_path / "a", tmp_path / "b", tmp_path / "c"))
    del values[missing]
    with pytest.raises(ConfigError, match=missing):
        tls_of_environment(values)


@pytest.mark.parametrize(
    "broken",
    [{"RAY_USE_TLS": "1"}, {"RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": "/gone/ca.pem"}],
    ids=["nothing", "one of three"],
)
def test_rays_variables_are_not_read_where_there_are_own_files(
    tmp_path: Path, broken: dict[str, str]
) -> None:
    own = TlsFiles(tmp_path / "a", tmp_path / "b", tmp_path / "c", "house")
    assert trust("t", own, broken, insecure=True) == Security("t", own, insecure=True)
    with pytest.raises(ConfigError, match="RAY_TLS"):
        trust("t", None, broken)
    rays = TlsFiles(own.authority, own.certificate, own.key)
    assert trust("t", None, environment(own)) == Security("t", rays)

"""Channels and servers between our services: limits, keepalive, bearer token, TLS, errors.

Knows no message of the contract. Settings of the two ends match: a client never pings more often
than a server allows, a reconnecting client never backs off for more than about a second, and
nothing listens beyond loopback without a token or TLS unless it was told to.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from protos.address import join_address
from protos.channel_errors import abort
from protos.errors import ConfigError, Unauthenticated

VERIFIER_ID_KEY: Final = "outrider-verifier"
"""Metadata key of both draft streams: the owner of the sessions named on them, 16 hex digits."""

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Of one message in either direction; bulk rows travel in far smaller pieces."""

_RAY_FILES: Final = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
_AUTHORIZATION: Final = "authorization"

_SHARED_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A silent connection is pinged every 20 s and given up 10 s later, whichever end is alone.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Own connections: a fresh channel must not inherit the back-off of an old one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # An open stream is resumed by the prefix rule, never by the library.
    ("grpc.enable_retries", 0),
)
SERVER_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for mutual TLS. server_name: what a client expects the certificate to say, when
    it is not the address it dials."""

    authority: Path
    certificate: Path
    key: Path
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Security:
    """How two services trust each other. insecure: listen beyond loopback with neither."""

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("a token is made of printable ASCII characters")


def trust(
    token: str, own: TlsFiles | None, environ: Mapping[str, str], *, insecure: bool = False
) -> Security:
    """A service's security: `own` files are those its configuration names; without, Ray's.

    Raises: ConfigError as `tls_of_environment`, which is asked only when there are no own files.
    """
    files = own if own is not None else tls_of_environment(environ)
    return Security(token, files, insecure)


def tls_of_environment(environ: Mapping[str, str]) -> TlsFiles | None:
    """The certificates that Ray itself uses: RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT and
    RAY_TLS_SERVER_KEY, when RAY_USE_TLS is 1; None when it is not.

    Raises: ConfigError naming the variable that is missing.
    """
    if environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    for name in _RAY_FILES:
        if not environ.get(name):
            raise ConfigError(f"RAY_USE_TLS is set, but {name} names no file")
    authority, certificate, key = (Path(environ[name]) for name in _RAY_FILES)
    return TlsFiles(authority, certificate, key)


def call_metadata(
    security: Security, verifier_id: int | None = None
) -> tuple[tuple[str, str], ...]:
    """Metadata that every call carries; streams of a verifier name it besides."""
    pairs: list[tuple[str, str]] = []
    if security.token:
        pairs.append((_AUTHORIZATION, f"Bearer {security.token}"))
    if verifier_id is not None:
        pairs.append((VERIFIER_ID_KEY, f"{verifier_id:016x}"))
    return tuple(pairs)


def make_channel(address: str, security: Security) -> grpc.Channel:
    """A channel for the calling thread's blocking stubs; pass `call_metadata` with every call."""
    options = _client_options(security)
    if security.tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, _client_credentials(security.tls), options)


def make_aio_channel(address: str, security: Security) -> grpc.aio.Channel:
    """A channel for one event loop; pass `call_metadata` with every call."""
    options = _client_options(security)
    if security.tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, _client_credentials(security.tls), options)


def make_aio_server(security: Security) -> grpc.aio.Server:
    """A server that asks every call for the token, when there is one. Not yet bound."""
    interceptors = (_TokenCheck(security.token),) if security.token else ()
    return grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)


def bind(server: grpc.aio.Server, host: str, port: int, security: Security) -> int:
    """Bind and return the port (0 asks for a free one).

    Raises ConfigError for an address beyond loopback with neither token nor TLS, unless
    `security.insecure`, and for an address that cannot be bound.
    """
    trusted = bool(security.token) or security.tls is not None or security.insecure
    if not trusted and not is_loopback(host):
        raise ConfigError(
            f"listening on {host} needs a token or TLS; `insecure: true` lifts this on purpose"
        )
    address = join_address(host, port)
    try:
        if security.tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _server_credentials(security.tls))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}") from error
    if bound == 0:
        raise ConfigError(f"cannot listen on {address}")
    return bound


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def verifier_id_of(metadata: grpc.aio.Metadata | tuple[tuple[str, str | bytes], ...] | None) -> int:
    """The verifier that owns a stream; raises Unauthenticated when it does not say."""
    for key, value in metadata or ():
        if key == VERIFIER_ID_KEY and isinstance(value, str) and len(value) == 16:
            try:
                return int(value, 16)
            except ValueError:
                break
    raise Unauthenticated(f"streams carry {VERIFIER_ID_KEY}: 16 hex digits")


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no class parameters
    """Refuses calls of every kind that lack the token, before their messages are read."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        for key, value in handler_call_details.invocation_metadata or ():
            given = value if isinstance(value, bytes) else value.encode()
            if key == _AUTHORIZATION and hmac.compare_digest(given, self._expected):
                return await continuation(handler_call_details)
        return _refusal(await continuation(handler_call_details))


def _refusal(handler: _Handler) -> _Handler:
    """A handler of the same kind that answers UNAUTHENTICATED; messages stay undecoded bytes."""

    async def refuse(_: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        await abort(context, Unauthenticated("a valid bearer token is needed"))

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    # grpc-stubs leave out that an unknown method has no handler at all.
    streams_in = bool(getattr(handler, "request_streaming", False))
    streams_out = bool(getattr(handler, "response_streaming", False))
    return kinds[streams_in, streams_out](refuse)


def _client_options(security: Security) -> tuple[tuple[str, int | str], ...]:
    if security.tls is None or not security.tls.server_name:
        return CLIENT_OPTIONS
    return (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", security.tls.server_name))


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    try:
        return files.authority.read_bytes(), files.certificate.read_bytes(), files.key.read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS files cannot be read: {error.strerror}") from error


def _client_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    authority, certificate, key = _read(files)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    authority, certificate, key = _read(files)
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)

"""Errors of `protos.errors` <-> gRPC statuses, both ways.

The status code tells any client what happened; the class name and its fields ride in trailing
metadata, so our own clients raise the same error that the server did. Anything that is not an
OutriderError becomes INTERNAL without its text.
"""

from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from protos import errors

_CODES: Final[tuple[tuple[type[errors.OutriderError], grpc.StatusCode], ...]] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel, grpc.StatusCode.NOT_FOUND),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.PeerUnavailable, grpc.StatusCode.UNAVAILABLE),
)
_BY_NAME: Final[dict[str, type[errors.OutriderError]]] = {
    kind.__name__: kind
    for kind in (
        errors.ContextTooLong,
        errors.InvalidRequest,
        errors.UnknownModel,
        errors.Unauthenticated,
        errors.Overloaded,
        errors.Cancelled,
        errors.DeadlineExceeded,
        errors.ConfigError,
        errors.CheckpointError,
        errors.IncompatiblePair,
        errors.ProtocolError,
        errors.MalformedTree,
        errors.MalformedRows,
        errors.VersionMismatch,
        errors.PeerUnavailable,
    )
}
_BY_CODE: Final[dict[grpc.StatusCode, type[errors.OutriderError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.ProtocolError,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.NOT_FOUND: errors.UnknownModel,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
}
_KIND: Final = "outrider-error"
_PARAM: Final = "outrider-param"
_RETRY_AFTER: Final = "outrider-retry-after"

Pairs = tuple[tuple[str, str], ...]


def status_of(error: Exception) -> tuple[grpc.StatusCode, str, Pairs]:
    """Status code, text and trailing metadata of an error."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if code is None:
        return grpc.StatusCode.INTERNAL, "internal error", ()
    pairs = [(_KIND, type(error).__name__)]
    if isinstance(error, errors.InvalidRequest) and error.param is not None:
        pairs.append((_PARAM, _ascii(error.param)))
    if isinstance(error, errors.Overloaded):
        pairs.append((_RETRY_AFTER, f"{error.retry_after_s:.3f}"))
    return code, str(error), tuple(pairs)


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: Exception) -> NoReturn:
    """End a call with this error's status."""
    code, text, pairs = status_of(error)
    await context.abort(code, text, pairs)
    raise AssertionError("abort returned")


def error_from_rpc(error: grpc.RpcError) -> errors.OutriderError:
    """The error that a failed call stands for; PeerUnavailable when nothing better is known."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.PeerUnavailable(f"call failed: {type(error).__name__}")
    # grpc-stubs leave out that metadata entries are pairs.
    pairs: dict[str, object] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    text = error.details() or error.code().name
    kind = _BY_NAME.get(str(pairs.get(_KIND, "")))
    if kind is None:
        kind = _BY_CODE.get(error.code(), errors.PeerUnavailable)
    if issubclass(kind, errors.InvalidRequest):
        param = pairs.get(_PARAM)
        return kind(text, None if param is None else str(param))
    if issubclass(kind, errors.Overloaded):
        return kind(text, _seconds(pairs.get(_RETRY_AFTER)))
    return kind(text)


def _ascii(text: str) -> str:
    """Metadata values hold printable ASCII only."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


def _seconds(value: object) -> float:
    try:
        return max(float(str(value)), 0.0)
    except ValueError:
        return 1.0

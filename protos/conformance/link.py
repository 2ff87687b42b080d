"""The suite's own gRPC end: one verifier's calls to a drafter, blocking, every wait bounded.

Knows messages and no claim. What a drafter answers is decoded under the limits of its own record;
an answer that breaks the contract is `Broken`, and so is one that does not come in time.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import grpc

from protos import drafting_pb2 as pb
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_channel
from protos.channel_errors import error_from_rpc
from protos.codec import (
    DraftAnswer,
    decode_ack,
    decode_draft_reply,
    encode_context,
    encode_draft_request,
)
from protos.describe_codec import decode_description, encode_describe_request
from protos.errors import OutriderError, ProtocolError
from protos.exchange import (
    Capabilities,
    ContextAck,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftWork,
)
from protos.limits import Limits

WAIT_S: Final = 20.0
"""What any answer may take; a drafter of a real size answers in milliseconds."""

Message = TypeVar("Message")


class Broken(Exception):
    """A claim that does not hold; says what was expected and what came."""


class Stream:
    """One bidirectional stream: messages out, messages in with a limit on the wait."""

    def __init__(self, method: Callable[..., Any], metadata: Sequence[tuple[str, str]]) -> None:
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = method(iter(self._out.get, None), metadata=tuple(metadata))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, message: object) -> None:
        """Put one message on its way."""
        self._out.put(message)

    def receive(self, wait_s: float | None = None) -> Any:  # noqa: ANN401  # a generated message
        """The next message. Raises Broken on silence, OutriderError when the stream ended."""
        wait_s = WAIT_S if wait_s is None else wait_s
        try:
            message = self._in.get(timeout=wait_s)
        except queue.Empty:
            raise Broken(f"no answer within {wait_s:.0f} s") from None
        if isinstance(message, grpc.RpcError):
            raise error_from_rpc(message) from message
        if message is None:
            raise Broken("the drafter ended the stream")
        return message

    def is_silent(self, wait_s: float) -> bool:
        """True when nothing comes for so long."""
        try:
            message = self._in.get(timeout=wait_s)
        except queue.Empty:
            return True
        self._in.put(message)
        return False

    def end(self) -> None:
        """Cut the stream off, as a verifier that is killed does."""
        self._out.put(None)
        self._call.cancel()
        self._reader.join(WAIT_S)

    def _read(self) -> None:
        try:
            for message in self._call:
                self._in.put(message)
            self._in.put(None)
        except grpc.RpcError as error:
            self._in.put(error)


class Verifier:
    """One verifier's two streams."""

    def __init__(self, stub: rpc.DrafterStub, metadata: Sequence[tuple[str, str]]) -> None:
        self._drafts = Stream(stub.Draft, metadata)
        self._context = Stream(stub.Context, metadata)
        self._limits = Limits()
        self._step = 0

    def send(self, works: Sequence[DraftWork]) -> int:
        """One step's message; its number."""
        self._step += 1
        self._drafts.send(encode_draft_request(self._step, 1.0, works))
        return self._step

    def send_message(self, message: pb.DraftRequest) -> None:
        """A message made by hand, under the next step's number."""
        self._step += 1
        message.step = self._step
        self._drafts.send(message)

    def receive(self) -> DraftAnswer:
        """The next reply, its results checked. Raises Broken."""
        try:
            answer = decode_draft_reply(self._drafts.receive(), self._limits)
        except ProtocolError as error:
            raise Broken(f"a reply that breaks the contract: {error}") from error
        if answer.malformed:
            raise Broken(f"a result that breaks the contract: {answer.malformed[0].error}")
        return answer

    def receive_loosely(self) -> list[DraftResult]:
        """The next reply's results as they stand, one session twice included."""
        message = self._drafts.receive()
        try:
            return [
                result
                for entry in message.results
                for result in decode_draft_reply(
                    pb.DraftReply(results=[entry]), self._limits
                ).results
            ]
        except ProtocolError as error:
            raise Broken(f"a reply that breaks the contract: {error}") from error

    def is_silent(self, wait_s: float) -> bool:
        """True when the Draft stream says nothing for so long."""
        return self._drafts.is_silent(wait_s)

    def send_rows(self, piece: ContextRows) -> None:
        """One piece of rows."""
        self._context.send(encode_context(piece))

    def receive_ack(self) -> ContextAck:
        """The next acknowledgement. Raises Broken."""
        try:
            return decode_ack(self._context.receive(), self._limits)
        except ProtocolError as error:
            raise Broken(f"an acknowledgement that breaks the contract: {error}") from error

    def end(self) -> None:
        """Leave without a word."""
        self._drafts.end()
        self._context.end()


class Link:
    """A drafter server at one address."""

    def __init__(self, address: str, token: str) -> None:
        self._security = Security(token=token)
        self._channel = make_channel(address, self._security)
        self._stub = rpc.DrafterStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    @property
    def has_token(self) -> bool:
        """Whether the calls carry one."""
        return bool(self._security.token)

    def describe(self) -> tuple[Capabilities, DrafterLoad]:
        """The drafter's record and load. Raises OutriderError."""
        return self._describe(encode_describe_request(), call_metadata(self._security))

    def describe_in_version(self, version: int) -> None:
        """Ask in another version. Raises OutriderError as the drafter answers."""
        request = pb.DescribeRequest(protocol_version=version)
        self._describe(request, call_metadata(self._security))

    def verifier(self, verifier_id: int) -> Verifier:
        """Both streams of one verifier."""
        return Verifier(self._stub, call_metadata(self._security, verifier_id))

    def outcome_of_streams(self, token: str | None, verifier_id: int | None) -> list[str]:
        """How Draft and Context end for a caller with this token and id: names of errors."""
        security = self._security if token is None else Security(token=token)
        metadata = call_metadata(security, verifier_id)
        return [
            _outcome(method, message, metadata)
            for method, message in (
                (self._stub.Draft, encode_draft_request(1, 0.0, [])),
                (self._stub.Context, pb.ContextPiece()),
            )
        ]

    def outcome_of_describe(self, token: str) -> str:
        """How Describe ends for a caller with this token: the error's name, empty for none."""
        try:
            self._describe(encode_describe_request(), call_metadata(Security(token=token)))
        except OutriderError as error:
            return type(error).__name__
        return ""

    def outcome_of_garbage(self, verifier_id: int) -> str:
        """How a Draft stream ends on bytes that are no message."""
        method = self._channel.stream_stream(
            "/outrider.v1.Drafter/Draft", bytes, pb.DraftReply.FromString
        )
        return _outcome(method, b"\xff\xff\xff\xff", call_metadata(self._security, verifier_id))

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _describe(
        self, request: pb.DescribeRequest, metadata: Sequence[tuple[str, str]]
    ) -> tuple[Capabilities, DrafterLoad]:
        try:
            found = self._stub.Describe(request, timeout=WAIT_S, metadata=tuple(metadata))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return decode_description(found)


def _outcome(
    method: Callable[..., Any], message: object, metadata: Sequence[tuple[str, str]]
) -> str:
    """The name of the error that a stream ends with after one message; empty when it goes on."""
    stream = Stream(method, metadata)
    stream.send(message)
    try:
        with contextlib.suppress(Broken):
            stream.receive(2.0)
        return ""
    except OutriderError as error:
        return type(error).__name__
    finally:
        stream.end()

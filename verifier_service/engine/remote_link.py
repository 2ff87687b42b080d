"""One drafter replica behind gRPC: a channel, the two streams, and the threads that read them.

Knows no session and no request: it moves messages and says when it is up or down. The engine's
thread only puts messages into outboxes; connecting, describing, reading and reconnecting happen
in this link's own threads, so nothing here ever holds a step. Everything decoded is checked
against the verifier's own limits before it is passed on.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

import grpc

from protos import drafting_pb2 as pb
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_channel
from protos.channel_errors import error_from_rpc
from protos.codec import decode_ack, decode_draft_reply, encode_context, encode_draft_request
from protos.describe_codec import decode_description, encode_describe_request
from protos.errors import OutriderError, PeerUnavailable, ProtocolError
from protos.exchange import Capabilities, ContextRows, DraftResult, DraftWork
from protos.limits import Limits
from verifier_service.engine.draft_events import (
    AckIn,
    AnswerBroken,
    AnswerIn,
    EventQueue,
    PeerDown,
    PeerUp,
    ProbeDone,
)
from verifier_service.engine.ports import PairExam

CONNECT_TIMEOUT_S: Final = 2.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0
"""Between attempts to connect: drafting is back within seconds of the drafter's return."""

EXAM_S: Final = 30.0
"""What a replica is given, from the first question on, to show that it belongs to the target."""

PATIENCE_S: Final = 1.0
"""What a peer is given to end its streams before they are cut."""

MAX_UNREAD: Final = 10_000
"""Events that may wait for the engine's thread; far more than its steps ever ask for."""

_logger = logging.getLogger(__name__)

Message = TypeVar("Message")


class _Outbox(Generic[Message]):
    """Messages on their way out, as the iterator that a stream consumes."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Message | None] = SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def end(self) -> None:
        """Half-close the stream after what was put before."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._queue.get, None)


@dataclass(slots=True)
class _Connection:
    """What exists while connected."""

    stub: rpc.DrafterStub
    drafts: "_Outbox[pb.DraftRequest]" = field(default_factory=_Outbox)
    pieces: "_Outbox[pb.ContextPiece]" = field(default_factory=_Outbox)

    def end(self) -> None:
        """Half-close both streams; also what lets grpc's threads that read the outboxes go."""
        self.drafts.end()
        self.pieces.end()


class RemoteLink:
    """A replica at one address, for one verifier."""

    def __init__(
        self,
        peer_id: int,
        address: str,
        security: Security,
        verifier_id: int,
        limits: Limits,
        events: EventQueue,
        exam: PairExam | None = None,
    ) -> None:
        self._peer_id = peer_id
        self._address = address
        self._security = security
        self._metadata = call_metadata(security, verifier_id)
        self._limits = limits
        self._events = events
        self._exam = exam
        self._channel: grpc.Channel | None = None
        self._connection: _Connection | None = None
        self._closing = threading.Event()
        self._said = ""
        self._thread = threading.Thread(
            target=self._keep_connected, name=f"drafts-{address}", daemon=True
        )
        self._thread.start()

    def send(self, step: int, remaining_s: float, works: Sequence[DraftWork]) -> None:
        """Put one step's message on its way; dropped while not connected."""
        connection = self._connection
        if connection is not None:
            connection.drafts.put(encode_draft_request(step, remaining_s, works))

    def send_rows(self, piece: ContextRows) -> None:
        """Put one piece of rows on its way; dropped while not connected."""
        connection = self._connection
        if connection is not None:
            connection.pieces.put(encode_context(piece))

    def probe(self) -> None:
        """Ask for a description without waiting; the answer comes as `ProbeDone`."""
        connection = self._connection
        if connection is None:
            self._events.put(ProbeDone(self._peer_id, has_answered=False))
            return
        try:
            call = connection.stub.Describe.future(
                encode_describe_request(), timeout=CONNECT_TIMEOUT_S, metadata=self._metadata
            )
        except ValueError:  # grpc's word for a channel closed by the reading thread meanwhile
            self._events.put(ProbeDone(self._peer_id, has_answered=False))
            return
        call.add_done_callback(
            lambda done: self._events.put(
                ProbeDone(self._peer_id, done.code() is grpc.StatusCode.OK)
            )
        )

    def retire(self) -> None:
        """Do not connect again once the connection ends."""
        self._closing.set()

    def hang_up(self) -> None:
        """End both streams once the outboxes are empty; never waits."""
        self._closing.set()
        connection = self._connection
        if connection is not None:
            connection.end()
        timer = threading.Timer(PATIENCE_S, self._cut)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Hang up, and wait until the threads are gone."""
        self.hang_up()
        self._thread.join(PATIENCE_S)
        self._cut()
        self._thread.join(PATIENCE_S)

    def _cut(self) -> None:
        """Cancel whatever a silent peer has left hanging."""
        channel = self._channel
        if self._thread.is_alive() and channel is not None:
            channel.close()

    def _keep_connected(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began_s = time.monotonic()
            channel = self._channel = make_channel(self._address, self._security)
            try:
                self._talk(channel)
                reason: OutriderError = PeerUnavailable("the drafter ended the stream")
            except grpc.RpcError as error:
                reason = error_from_rpc(error)
            except OutriderError as error:
                reason = error
            except ValueError as error:  # grpc's word for a channel that was closed meanwhile
                reason = PeerUnavailable(str(error))
            finally:
                self._leave(channel)
            self._say(reason)
            if time.monotonic() - began_s > CONNECT_TIMEOUT_S + LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _talk(self, channel: grpc.Channel) -> None:
        """Describe, open both streams, examine, and read until the connection ends."""
        stub = rpc.DrafterStub(channel)  # type: ignore[no-untyped-call]  # generated code
        description = stub.Describe(
            encode_describe_request(), timeout=CONNECT_TIMEOUT_S, metadata=self._metadata
        )
        capabilities, load = decode_description(description)
        connection = _Connection(stub)
        try:
            drafts = stub.Draft(iter(connection.drafts), metadata=self._metadata)
            acks = stub.Context(iter(connection.pieces), metadata=self._metadata)
            trouble = self._examine(capabilities, connection, drafts)
            self._connection = connection
            self._said = ""
            self._events.put(PeerUp(self._peer_id, capabilities, load, trouble))
            self._read(drafts, acks)
        finally:
            connection.end()

    def _read(self, drafts: "grpc.Call", acks: "grpc.Call") -> None:
        """Read both streams until the one with drafts ends."""
        reader = threading.Thread(
            target=self._read_acks, args=(acks, drafts), name="acks", daemon=True
        )
        reader.start()
        try:
            for message in drafts:  # type: ignore[attr-defined]  # grpc-stubs: calls iterate
                self._check_flood()
                self._events.put(self._decode_answer(message))
        finally:
            acks.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs
            reader.join()

    def _examine(
        self, capabilities: Capabilities, connection: _Connection, drafts: "grpc.Call"
    ) -> str:
        """Let the exam ask this replica over its own stream, before anyone else knows of it."""
        if self._exam is None:
            return ""

        timer = threading.Timer(EXAM_S, drafts.cancel)
        timer.daemon = True

        def ask(work: DraftWork) -> DraftResult | None:
            if timer.ident is None:  # an exam may first wait for another replica's
                timer.start()
            connection.drafts.put(encode_draft_request(0, EXAM_S, [work]))
            if work.close:
                return None
            while True:
                answer = decode_draft_reply(next(drafts), self._limits)  # type: ignore[call-overload]  # grpc-stubs: calls iterate
                if answer.malformed:
                    return None
                for result in answer.results:
                    if (result.session_id, result.base_len) == (work.session_id, work.base_len):
                        return result

        try:
            return self._exam.trouble(capabilities, ask)
        except StopIteration as error:
            raise PeerUnavailable("the drafter ended the stream") from error
        finally:
            timer.cancel()

    def _decode_answer(self, message: pb.DraftReply) -> AnswerIn | AnswerBroken:
        at_s = time.monotonic()
        try:
            return AnswerIn(self._peer_id, decode_draft_reply(message, self._limits), at_s)
        except ProtocolError as error:
            return AnswerBroken(self._peer_id, error)

    def _read_acks(self, acks: "grpc.Call", drafts: "grpc.Call") -> None:
        """Read until the stream ends; a replica that has lost one stream is left altogether."""
        try:
            for message in acks:  # type: ignore[attr-defined]  # grpc-stubs: calls iterate
                self._check_flood()
                try:
                    self._events.put(AckIn(self._peer_id, decode_ack(message, self._limits)))
                except ProtocolError as error:
                    self._events.put(AckIn(self._peer_id, None, error))
        except (grpc.RpcError, ProtocolError) as error:
            _logger.debug("rows stream to %s ended: %s", self._address, type(error).__name__)
        finally:
            if not self._closing.is_set():
                drafts.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs

    def _check_flood(self) -> None:
        """A peer that says more than anyone asked for may not fill this process's memory."""
        if self._events.qsize() > MAX_UNREAD:
            raise ProtocolError(f"more than {MAX_UNREAD} answers wait to be read")

    def _leave(self, channel: grpc.Channel) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._events.put(PeerDown(self._peer_id, "connection ended"))
        channel.close()

    def _say(self, reason: OutriderError) -> None:
        """One line per reason, not one per attempt."""
        text = f"{type(reason).__name__}: {reason}"
        if text != self._said and not self._closing.is_set():
            self._said = text
            _logger.warning("drafter at %s is not connected: %s", self._address, text)

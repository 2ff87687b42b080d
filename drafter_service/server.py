"""The gRPC edge of a drafter: Describe, and the Draft and Context streams (design 5).

Each stream has one reader and one writer on the event loop; computing happens on the worker's
thread, so the loop goes on reading while a draft is made. Decodes, names sessions by their owner,
hands over, encodes. Knows no algorithm. A malformed entry ends its session, never the stream.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from drafter_service.drafter import Drafter
from drafter_service.worker import Drafted, DraftWorker
from protos import drafting_pb2 as pb
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, bind, make_aio_server, verifier_id_of
from protos.channel_errors import abort
from protos.codec import (
    DraftCall,
    decode_context,
    decode_draft_request,
    encode_ack,
    encode_draft_reply,
)
from protos.describe_codec import check_describe_request, encode_description
from protos.errors import OutriderError, PeerUnavailable, ProtocolError
from protos.exchange import (
    Capabilities,
    ContextAck,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftStatus,
    DraftWork,
)
from protos.limits import drafter_limits

logger = logging.getLogger(__name__)

MAX_CALLS = 64
MAX_PIECES = 32
"""Messages of one stream that may wait; more stay with the sender (HTTP/2 flow control)."""

STOP_GRACE_S = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]
_Reply = Callable[[Any], None]


class DrafterServer:
    """A drafter on a port of this machine, on the event loop that calls `start`."""

    def __init__(
        self,
        drafter: Drafter,
        security: Security,
        host: str = "127.0.0.1",
        port: int = 0,
        max_works: int = 256,
    ) -> None:
        self._drafter = drafter
        self._security = security
        self._host = host
        self._asked_port = port
        self._worker = DraftWorker(_Guarded(drafter))
        self._servicer = _Servicer(self._worker, drafter.capabilities, max_works)
        self._server: grpc.aio.Server | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The drafter's capability record."""
        return self._drafter.capabilities

    def load(self) -> DrafterLoad:
        """Counts and sums; from any thread."""
        return self._worker.load()

    def metrics(self) -> dict[str, float]:
        """Everything counted, by name; from any thread."""
        return self._worker.metrics.snapshot()

    def check_health(self) -> None:
        """Raises PeerUnavailable when the computing thread has ended."""
        if self._server is not None and not self._worker.is_alive:
            raise PeerUnavailable("the drafter's computing thread has ended")

    async def start(self) -> int:
        """Bind, serve and return the port. Raises ConfigError."""
        server = make_aio_server(self._security)
        rpc.add_DrafterServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]
        port = bind(server, self._host, self._asked_port, self._security)
        self._worker.start()
        await server.start()
        self._server = server
        logger.info("%s drafter listens on port %d", self.capabilities.kind, port)
        return port

    async def stop(self, drain_s: float = 10.0) -> None:
        """Wait until all sessions have left or `drain_s` is over, then end."""
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + drain_s
        while self._worker.load().num_sessions and loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        await self._server.stop(STOP_GRACE_S)
        await asyncio.to_thread(self._worker.stop)
        self._server = None


class _Guarded:
    """A drafter that cannot end the computing thread: a bug costs the sessions of one call."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def capabilities(self) -> Capabilities:
        return self._drafter.capabilities

    def handle(self, works: Sequence[DraftWork]) -> list[DraftResult]:
        try:
            return self._drafter.handle(works)
        except Exception:  # the edge: the log says what, the verifier that it drafts without us
            logger.exception("drafting failed; its %d sessions are ended", len(works))
        self._drafter.handle([replace(work, close=True) for work in works])
        incarnation = self.capabilities.incarnation
        return [
            DraftResult(
                work.session_id,
                incarnation,
                work.base_len,
                DraftStatus.REFUSED,
                detail="internal error",
            )
            for work in works
            if not work.close
        ]

    def absorb(self, pieces: Sequence[ContextRows]) -> list[ContextAck]:
        try:
            return self._drafter.absorb(pieces)
        except Exception:  # as above
            logger.exception("absorbing failed; its %d sessions are ended", len(pieces))
        named = [(piece.session_id, piece.incarnation) for piece in pieces]
        self._drafter.handle([DraftWork(*name, 0, 0, (), close=True) for name in named])
        return [ContextAck(*name, 0, True, "internal error") for name in named]

    def load(self) -> DrafterLoad:
        return self._drafter.load()

    def expire(self, now: float) -> int:
        return self._drafter.expire(now)


class _Servicer(rpc.DrafterServicer):
    """The three calls. Sessions are keyed by (verifier, session id)."""

    def __init__(self, worker: DraftWorker, capabilities: Capabilities, max_works: int) -> None:
        self._worker = worker
        self._capabilities = capabilities
        self._limits = drafter_limits(capabilities, max_works)
        # Keyed with a secret, so that no verifier can aim at another one's sessions.
        self._secret = secrets.token_bytes(16)

    async def Describe(  # noqa: N802  # the name in the .proto
        self, request: pb.DescribeRequest, context: _Context
    ) -> pb.DescribeResponse:
        """What this drafter is, and its load."""
        try:
            check_describe_request(request)
        except OutriderError as error:
            await abort(context, error)
        return encode_description(self._capabilities, self._worker.load())

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: _Context
    ) -> None:
        """Read works, draft, write replies, until the verifier ends the stream."""
        owner = await _owner(context)

        def take(message: pb.DraftRequest, reply: _Reply) -> None:
            try:
                call = decode_draft_request(message, self._limits)
            except ProtocolError as error:
                logger.warning("verifier %016x: message refused: %s", owner, error)
                reply(encode_draft_reply(message.step, []))
                return
            works = [self._owned(owner, work) for work in call.works]
            works += [self._ending(owner, bad.session_id) for bad in call.malformed]
            self._worker.draft(works, lambda drafted: reply(self._answer(call, drafted)))

        await _serve_stream(context, MAX_CALLS, take)

    async def Context(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ContextPiece], context: _Context
    ) -> None:
        """Read pieces of rows, absorb them, acknowledge each."""
        owner = await _owner(context)

        def take(message: pb.ContextPiece, reply: _Reply) -> None:
            session_id = message.session_id
            try:
                piece = decode_context(message, self._limits)
            except ProtocolError as error:
                logger.warning("verifier %016x: rows refused: %s", owner, error)
                ack = ContextAck(session_id, self._incarnation, 0, True, str(error))
                ending = [self._ending(owner, session_id)]
                self._worker.draft(ending, lambda _: reply(encode_ack(ack)))
                return
            owned = replace(piece, session_id=self._key(owner, session_id))
            self._worker.absorb(
                owned, lambda ack: reply(encode_ack(replace(ack, session_id=session_id)))
            )

        await _serve_stream(context, MAX_PIECES, take)

    @property
    def _incarnation(self) -> int:
        return self._capabilities.incarnation

    def _key(self, owner: int, session_id: int) -> int:
        """One number for (verifier, session id); 64 bits of a keyed hash."""
        name = owner.to_bytes(8, "little") + session_id.to_bytes(8, "little")
        digest = hashlib.blake2b(name, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little")

    def _owned(self, owner: int, work: DraftWork) -> DraftWork:
        return replace(work, session_id=self._key(owner, work.session_id))

    def _ending(self, owner: int, session_id: int) -> DraftWork:
        key = self._key(owner, session_id)
        return DraftWork(key, self._incarnation, base_len=0, token_start=0, tokens=(), close=True)

    def _answer(self, call: DraftCall, drafted: Drafted) -> pb.DraftReply:
        """Results under the verifier's own session ids, and a refusal per malformed entry."""
        open_works = [work for work in call.works if not work.close]
        results = [
            replace(result, session_id=work.session_id)
            for work, result in zip(open_works, drafted.results, strict=True)
        ]
        results += [
            DraftResult(
                session_id=bad.session_id,
                incarnation=self._incarnation,
                base_len=bad.base_len,
                status=DraftStatus.REFUSED,
                detail=str(bad.error),
            )
            for bad in call.malformed
        ]
        self._worker.metrics.num_malformed += len(call.malformed)
        return encode_draft_reply(call.step, results, drafted.queue_s, drafted.draft_s)


async def _owner(context: _Context) -> int:
    """The verifier that owns this stream's sessions; the call ends when it does not say."""
    try:
        return verifier_id_of(context.invocation_metadata())
    except OutriderError as error:
        await abort(context, error)


async def _serve_stream(context: _Context, most: int, take: Callable[[Any, _Reply], None]) -> None:
    """Read messages as they come, at most `most` unanswered; write replies as they get ready.

    `take` is called for every message with a callback for its one reply, good on any thread.
    """
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(most)
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    num_read = 0

    def reply(message: object) -> None:
        # A closed loop means that the server has stopped: nobody is left to read the reply.
        if not loop.is_closed():
            loop.call_soon_threadsafe(outbox.put_nowait, message)

    async def read() -> int:
        nonlocal num_read
        while True:
            await room.acquire()
            message = await context.read()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # grpc-stubs leave it out
                return num_read
            num_read += 1
            take(message, reply)

    reader = asyncio.ensure_future(read())
    reader.add_done_callback(lambda _: outbox.put_nowait(None))
    num_written = 0
    try:
        while not (reader.done() and num_written == num_read):
            message = await outbox.get()
            if message is not None:
                await context.write(message)
                num_written += 1
                room.release()
        await reader
    finally:
        reader.cancel()

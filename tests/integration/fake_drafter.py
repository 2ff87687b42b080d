"""A drafter on loopback that a test can turn bad: real gRPC, real codec, no model.

Keeps sessions by the prefix rule in the plainest way (a list of tokens, the rows as bytes) and
drafts what `guess` says comes next. `mode` decides what it answers with from now on.
"""

import asyncio
import random
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

from protos import drafting_pb2 as pb
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, bind, make_aio_server, verifier_id_of
from protos.channel_errors import abort
from protos.codec import (
    decode_context,
    decode_draft_request,
    encode_ack,
    encode_draft_reply,
)
from protos.describe_codec import check_describe_request, encode_description
from protos.errors import OutriderError
from protos.exchange import (
    Capabilities,
    ContextAck,
    DrafterLoad,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
)
from protos.limits import drafter_limits
from protos.tree import CandidateTree, chain


class Mode(StrEnum):
    """How a drafter behaves. All but GOOD, LATE and FORGETFUL lie or break the contract."""

    GOOD = "good"
    RANDOM = "random"
    OVERLONG = "overlong"
    TOO_DEEP = "too_deep"
    BAD_PARENT = "bad_parent"
    TWINS = "twins"
    BAD_ID = "bad_id"
    WRONG_BASE = "wrong_base"
    NAN = "nan"
    SHORT_SCORES = "short_scores"
    BAD_STATUS = "bad_status"
    STRANGER = "stranger"
    FLOOD = "flood"
    TORRENT = "torrent"
    PICKLE = "pickle"
    SILENT = "silent"
    LATE = "late"
    FORGETFUL = "forgetful"
    DENIES_ROWS = "denies_rows"
    REFUSES = "refuses"


Guess = Callable[[Sequence[int], int], list[int]]
"""(tokens, how many) -> the next tokens."""


@dataclass
class FakeSession:
    tokens: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)


class FakeDrafter(rpc.DrafterServicer):
    """One replica, serving on its own thread from `start` to `stop`."""

    def __init__(
        self,
        guess: Guess,
        vocab_size: int,
        *,
        name: str = "fake",
        incarnation: int = 1,
        security: Security | None = None,
        capabilities: dict[str, object] | None = None,
        hostile_bytes: bytes = b"",
    ) -> None:
        self.mode = Mode.GOOD
        self.delay_s = 0.0
        self.sessions: dict[int, FakeSession] = {}
        self.verifiers: set[int] = set()
        self.num_opens = 0
        self.num_closes = 0
        self.num_lost = 0
        self.num_works = 0
        self.piece_bytes: list[int] = []
        self.inline_bytes: list[int] = []
        self.num_streams = 0
        self.port = 0
        self._guess = guess
        self._vocab_size = vocab_size
        self._hostile_bytes = hostile_bytes
        self._security = security or Security(token="secret")
        self._rng = random.Random(incarnation)
        values: dict[str, object] = {
            "kind": "fake",
            "name": name,
            "incarnation": incarnation,
            "plan_kinds": (PlanKind.CHAIN, PlanKind.TREE),
            "vocab_size": vocab_size,
            "max_context": 16384,
            "max_depth": 16,
            "max_width": 8,
            "max_nodes": 64,
        }
        self.capabilities = Capabilities(**(values | (capabilities or {})))  # type: ignore[arg-type]
        self._limits = drafter_limits(self.capabilities)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, port: int = 0) -> "FakeDrafter":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(port), self._loop).result(10)
        return self

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, port: int) -> None:
        self._server = make_aio_server(self._security)
        rpc.add_DrafterServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", port, self._security)
        await self._server.start()

    async def _end(self) -> None:
        await self._server.stop(0)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def Describe(self, request, context):  # noqa: N802
        try:
            check_describe_request(request)
        except OutriderError as error:
            await abort(context, error)
        return encode_description(self.capabilities, DrafterLoad(len(self.sessions)))

    async def Draft(self, request_iterator, context):  # noqa: N802
        self.num_streams += 1
        self.verifiers.add(verifier_id_of(context.invocation_metadata()))
        while (message := await context.read()) is not grpc.aio.EOF:
            call = decode_draft_request(message, self._limits)
            assert not call.malformed, call.malformed
            self.num_works += len(call.works)
            results = [r for work in call.works if (r := self._handle(work)) is not None]
            mode = self.mode
            if mode is Mode.SILENT:
                continue
            if mode is Mode.LATE and any(w.plan.kind is not PlanKind.NONE for w in call.works):
                await asyncio.sleep(self.delay_s)
            reply = encode_draft_reply(call.step, results, 0.0001, 0.0002)
            for _ in range(30_000 if mode is Mode.TORRENT else 0):
                await context.write(reply)
            await context.write(self._spoil(reply, mode))

    async def Context(self, request_iterator, context):  # noqa: N802
        while (message := await context.read()) is not grpc.aio.EOF:
            session = self.sessions.get(message.session_id)
            piece = decode_context(message, self._limits)
            self.piece_bytes.append(len(piece.rows.data))
            held = self._hold(session, piece.rows) if session else 0
            await context.write(
                encode_ack(
                    ContextAck(
                        piece.session_id,
                        self.capabilities.incarnation,
                        held,
                        lost=session is None,
                    )
                )
            )

    def _handle(self, work: DraftWork) -> DraftResult | None:
        if work.close:
            self.num_closes += self.sessions.pop(work.session_id, None) is not None
            return None
        if self.mode is Mode.FORGETFUL and self._rng.random() < 0.3:
            self.sessions.pop(work.session_id, None)
        if self.mode is Mode.REFUSES:
            return self._answer(work, DraftStatus.REFUSED, detail="not today")
        ours = work.incarnation == self.capabilities.incarnation
        if ours and work.open is not None:
            self.num_opens += 1
            self.sessions[work.session_id] = FakeSession()
        session = self.sessions.get(work.session_id)
        if not ours or session is None or work.token_start > len(session.tokens):
            self.num_lost += 1
            return self._answer(work, DraftStatus.LOST)
        session.tokens[work.token_start :] = work.tokens
        if work.rows is not None:
            self.inline_bytes.append(len(work.rows.data))
            self._hold(session, work.rows)
        tree = self._draft(session.tokens, work.plan)
        return self._answer(work, DraftStatus.OK, tree)

    def _answer(
        self,
        work: DraftWork,
        status: DraftStatus,
        tree: CandidateTree | None = None,
        detail: str = "",
    ) -> DraftResult:
        session = self.sessions.get(work.session_id, FakeSession())
        tree = tree or CandidateTree()
        return DraftResult(
            session_id=work.session_id,
            incarnation=self.capabilities.incarnation,
            base_len=work.base_len,
            status=status,
            held_tokens=len(session.tokens),
            held_rows=0 if self.mode is Mode.DENIES_ROWS else len(session.rows),
            tree=tree,
            ranked_ids=tuple((token,) for token in tree.tokens) if tree.is_chain else (),
            detail=detail,
        )

    @staticmethod
    def _hold(session: FakeSession, rows) -> int:
        size = rows.width * rows.dtype.num_bytes
        if rows.start <= len(session.rows):
            cut = [rows.data[i * size : (i + 1) * size] for i in range(rows.count)]
            session.rows[rows.start :] = cut
        return len(session.rows)

    def _draft(self, tokens: Sequence[int], plan: Plan) -> CandidateTree:
        if plan.kind is PlanKind.NONE:
            return CandidateTree()
        if self.mode is Mode.RANDOM:
            return chain([self._rng.randrange(self._vocab_size) for _ in range(plan.depth)])
        right = self._guess(tokens, plan.depth)
        if plan.kind is PlanKind.CHAIN:
            return chain(right, [-0.5 * (i + 1) for i in range(len(right))])
        return self._bush(right, plan)

    def _bush(self, right: Sequence[int], plan: Plan) -> CandidateTree:
        """The right path, with one wrong sibling per level."""
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        parent = 0
        for depth, token in enumerate(right, 1):
            if len(tokens) + 2 > plan.nodes:
                break
            tokens += [(token + 1) % self._vocab_size, token]
            parents += [parent, parent]
            scores += [-2.0 * depth, -0.5 * depth]
            parent = len(tokens)
        return CandidateTree(tuple(tokens), tuple(parents), tuple(scores))

    def _spoil(self, reply: pb.DraftReply, mode: Mode) -> pb.DraftReply:
        """Break the message the way `mode` says, after the codec made it."""
        if mode is Mode.FLOOD:
            reply.results.extend([pb.DraftResult(session_id=i + 1) for i in range(5000)])
        for result in reply.results:
            tree, n = result.tree, len(result.tree.tokens)
            if mode is Mode.PICKLE:
                result.tree.scores = self._hostile_bytes
                result.detail = self._hostile_bytes.decode("latin-1")
            if not n:
                continue
            if mode in (Mode.OVERLONG, Mode.TOO_DEEP):
                more = 500 if mode is Mode.OVERLONG else 3
                for i in range(more):
                    tree.tokens.append(i % self._vocab_size)
                    tree.parents.append(n + i)
                tree.scores += struct.pack(f"<{more}e", *[-1.0] * more)
            elif mode is Mode.BAD_PARENT:
                tree.parents[-1] = n + 7
            elif mode is Mode.TWINS:
                tree.tokens.append(tree.tokens[0])
                tree.parents.append(tree.parents[0])
                tree.scores += struct.pack("<e", -1.0)
            elif mode is Mode.BAD_ID:
                tree.tokens[0] = self._vocab_size + 5
            elif mode is Mode.WRONG_BASE:
                result.base_len += 9
            elif mode is Mode.NAN:
                tree.scores = struct.pack(f"<{n}e", *[float("nan")] * n)
            elif mode is Mode.SHORT_SCORES:
                tree.scores = tree.scores[:-1]
            elif mode is Mode.BAD_STATUS:
                result.status = 77
            elif mode is Mode.STRANGER:
                result.session_id ^= 1
        return reply

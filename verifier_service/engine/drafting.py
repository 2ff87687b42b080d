"""The draft exchange: asks every drafter concerned, waits until the deadline, hands back drafts.

Used by the engine's thread; only `set_replicas` and `counts` may be called from another. Knows no
model and no wire: sessions do the bookkeeping of the prefix rule, links carry messages, and both
kinds of drafter (in this process, behind gRPC) answer through one queue. Whatever a drafter does,
an exchange returns by its deadline, and what it returns are trees over the vocabulary whose path
the committed tokens have followed.
"""

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final

from protos.channel import Security
from protos.exchange import INLINE_ROWS_BYTES, DrafterReplica, Plan, PlanKind
from protos.limits import Limits
from protos.plans import clip_plan
from verifier_service.engine.draft_counts import DraftCounts
from verifier_service.engine.draft_desk import DraftDesk
from verifier_service.engine.draft_events import Event, EventQueue, PeerUp
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.draft_peer import DraftPeer
from verifier_service.engine.draft_round import DraftRound
from verifier_service.engine.draft_session import Question, Reply, RowsMissing
from verifier_service.engine.local_link import LocalDrafter, LocalLink, ask_local
from verifier_service.engine.ports import (
    Draft,
    DraftAsk,
    PairExam,
    RowReader,
    SequenceView,
    SourceInfo,
)
from verifier_service.engine.remote_link import RemoteLink
from verifier_service.engine.replica_pool import ReplicaPool
from verifier_service.engine.session_book import Entry, SessionBook

MAX_WAIT_S: Final = 2.0
"""No plan holds a step for longer, whatever it says."""

ABSORB_LAG: Final = 16
"""A decoding request's sessions that are fed without being asked are brought up to date when they
lack so many tokens or rows."""

BULK_BYTES_PER_STEP: Final = 2 * 1024 * 1024
"""Rows read and sent over Context in one step, so that a long prompt does not hold it."""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """security: towards remote drafters. max_nodes, max_depth: largest tree taken from anyone."""

    security: Security = field(default_factory=Security)
    max_nodes: int = 256
    max_depth: int = 64
    inline_bytes: int = INLINE_ROWS_BYTES
    bulk_bytes_per_step: int = BULK_BYTES_PER_STEP


class DraftExchange:
    """Implements the `Drafting` port."""

    def __init__(
        self,
        target: TargetEnd,
        read_rows: RowReader,
        settings: ExchangeSettings | None = None,
        exam: PairExam | None = None,
    ) -> None:
        """exam: asked once per connection whether the drafter belongs here; None: all do."""
        self._settings = settings or ExchangeSettings()
        self._read_rows = read_rows
        self._exam = exam
        rng = random.SystemRandom()
        self._verifier_id = rng.getrandbits(64)
        self._limits = Limits(
            vocab_size=target.vocab_size,
            max_nodes=self._settings.max_nodes,
            max_depth=self._settings.max_depth,
        )
        self._peer_ids = itertools.count(1)
        self._events: EventQueue = SimpleQueue()
        self._lock = threading.Lock()
        self._pools: dict[str, ReplicaPool] = {}
        self._book = SessionBook(rng)
        self._desk = DraftDesk(target, self._book)
        self._is_closed = False

    # What any thread may call.

    def set_replicas(self, source: str, replicas: Sequence[DrafterReplica]) -> None:
        """The replicas that run now for a remote source; connects and leaves in the background."""
        if self._is_closed:
            return
        self._pool(source).offer(replicas, self._make_peer)

    @property
    def num_sessions(self) -> int:
        """Sessions that running requests have now, over all sources."""
        return len(self._book)

    def counts(self) -> dict[str, DraftCounts]:
        """Sums by source."""
        return {name: pool.tally.snapshot() for name, pool in self._pools.items()}

    def local_sources_with_q(self) -> frozenset[str]:
        """Drafters of this process that could draft for `acceptance: rejection`."""
        found = [
            name
            for name, pool in self._pools.items()
            for peer in pool.peers
            if peer.is_local and peer.capabilities is not None and peer.capabilities.gives_q
        ]
        return frozenset(found)

    def refused_sources(self) -> frozenset[str]:
        """Sources of which every replica met so far does not belong to this target."""
        return frozenset(
            name
            for name, pool in self._pools.items()
            if pool.peers and all(peer.trouble for peer in pool.peers)
        )

    # What the engine's thread calls.

    def add_local(self, drafter: LocalDrafter, source: str | None = None) -> None:
        """A drafter of this process; its source is called by its own name unless one is given."""
        capabilities = drafter.capabilities
        name = source or capabilities.name or capabilities.kind
        peer_id = next(self._peer_ids)
        peer = DraftPeer(peer_id, name, "local", is_local=True)
        peer.transport = LocalLink(peer_id, drafter, self._events)
        self._pool(name).add(peer)
        self._desk.seat(peer, self._pool(name).tally)
        trouble = ""
        if self._exam is not None:
            trouble = self._exam.trouble(capabilities, lambda work: ask_local(drafter, work))
        self._desk.take(PeerUp(peer_id, capabilities, peer.load, trouble), None)

    def sources(self) -> list[SourceInfo]:
        """Sources that can be asked now."""
        self._settle()
        return [info for pool in self._pools.values() if (info := pool.info()) is not None]

    def exchange(self, asks: Sequence[DraftAsk], deadline_s: float) -> dict[int, list[Draft]]:
        """Send all asks, wait until all planned drafts are in or deadline_s has passed."""
        self._settle()
        # Not a number and below zero: no wait.
        wait_s = min(deadline_s, MAX_WAIT_S) if deadline_s > 0.0 else 0.0
        step = DraftRound(time.monotonic(), wait_s, self._settings.bulk_bytes_per_step)
        for ask in asks:
            for pool in self._pools.values():
                self._address(ask, pool, step)
        self._send(step)
        self._wait(step)
        return {ask.view.key: drafts for ask in asks if (drafts := self._collect(ask.view))}

    def forget(self, key: int) -> None:
        """The request left: close its sessions."""
        self._book.forget(key)

    def close(self) -> None:
        """Close all sessions and streams."""
        self._is_closed = True
        self._book.forget_all()
        transports = [peer.transport for pool in self._pools.values() for peer in pool.peers]
        for transport in transports:
            if transport is not None:
                transport.hang_up()
        for transport in transports:
            if transport is not None:
                transport.close()

    def _pool(self, source: str) -> ReplicaPool:
        with self._lock:
            if source not in self._pools:
                # A new dictionary: the engine's thread may be iterating over the old one.
                self._pools = {**self._pools, source: ReplicaPool(source)}
            return self._pools[source]

    def _make_peer(self, source: str, address: str) -> DraftPeer:
        peer = DraftPeer(next(self._peer_ids), source, address, is_local=False)
        self._desk.seat(peer, self._pools[source].tally)
        peer.transport = RemoteLink(
            peer.peer_id,
            address,
            self._settings.security,
            self._verifier_id,
            self._limits,
            self._events,
            self._exam,
        )
        return peer

    def _settle(self) -> None:
        """Take in what has arrived, and look after replicas that left or fell silent."""
        self._drain(None)
        now_s = time.monotonic()
        for pool in self._pools.values():
            for peer in pool.peers:
                peer.look_after(now_s)
                if not peer.is_offered:
                    self._leave(pool, peer)

    def _drain(self, step: DraftRound | None) -> None:
        """Take in what is there now; what a drafter goes on sending meanwhile comes next time."""
        for _ in range(self._events.qsize()):
            try:
                event: Event = self._events.get_nowait()
            except Empty:
                return
            self._desk.take(event, step)

    def _leave(self, pool: ReplicaPool, peer: DraftPeer) -> None:
        """A replica is not offered any more: its sessions end there, and move when next asked."""
        for entry in list(self._book.at(peer)):
            self._book.close(entry)
        if peer.transport is not None:
            peer.transport.hang_up()
        self._desk.unseat(peer)
        pool.drop(peer)

    def _address(self, ask: DraftAsk, pool: ReplicaPool, step: DraftRound) -> None:
        """Put one request's share for one source into this step's parcels."""
        view = ask.view
        if self._book.is_refused(view.key, pool.source):
            return
        planned = next((p.plan for p in ask.plans if p.source == pool.source), None)
        if planned is None:
            return
        entry = self._book.find(view.key, pool)
        if entry is None:
            return
        limits = entry.peer.capabilities
        plan = clip_plan(planned, limits, view.base_len) if limits is not None else Plan()
        try:
            self._pack(view, entry, plan, step)
        except RowsMissing:
            pool.tally.add("rows_missing")
            step.withdraw(entry.session.session_id, entry.peer)
            self._book.refuse(entry)

    def _pack(self, view: SequenceView, entry: Entry, plan: Plan, step: DraftRound) -> None:
        peer, session = entry.peer, entry.session
        most = peer.capabilities.max_context if peer.capabilities else 0
        if most and view.base_len > most:
            self._book.refuse(entry)
            return
        is_asked = plan.kind is not PlanKind.NONE
        is_due = not session.is_open or session.lag(view) >= (ABSORB_LAG if view.decoding else 1)
        if not is_asked and not is_due and session.rows_lag(view) < ABSORB_LAG:
            return
        parcel = step.parcel(peer)
        if is_asked or is_due:
            question = Question(plan, parcel.step, step.began_s)
            inline_bytes = None if peer.is_local else self._settings.inline_bytes
            parcel.works.append(session.work(view, question, self._read_rows, inline_bytes))
        if is_asked:
            step.expect(session.session_id, peer, view.base_len)
        budget = min(step.bulk_budget, peer.bulk_room)
        for piece in session.bulk(view, self._read_rows, budget):
            step.bulk_budget -= len(piece.rows.data)
            parcel.pieces.append(piece)

    def _send(self, step: DraftRound) -> None:
        """Remote drafters first: they work while the local ones hold this thread."""
        for parcel in sorted(step.parcels.values(), key=lambda parcel: parcel.peer.is_local):
            if parcel.works:
                parcel.peer.send(parcel.step, step.wait_s, parcel.works, step.began_s)
            for piece in parcel.pieces:
                parcel.peer.send_rows(piece)
            self._desk.count_sent(parcel)

    def _wait(self, step: DraftRound) -> None:
        self._drain(step)
        while step.awaited and (left_s := step.until_s - time.monotonic()) > 0.0:
            try:
                event = self._events.get(timeout=left_s)
            except Empty:
                break
            self._desk.take(event, step)
        now_s = time.monotonic()
        self._desk.close_round(step, now_s)
        for source, held_s in step.held_s(now_s).items():
            self._pools[source].tally.add("wait_s", held_s)

    def _collect(self, view: SequenceView) -> list[Draft]:
        drafts = []
        for entry in self._book.of_request(view.key):
            reply, entry.session.latest = entry.session.latest, None
            if reply is not None:
                draft = self._fit(reply, entry, view)
                if draft is not None:
                    drafts.append(draft)
        return drafts

    def _fit(self, reply: Reply, entry: Entry, view: SequenceView) -> Draft | None:
        """The draft as it stands under the newest committed tokens; None when nothing is left."""
        result = reply.result
        committed, q = tuple(view.tokens[result.base_len : view.base_len]), result.q
        tree, ranked = result.tree.believing(result.confidences), result.ranked_ids
        if committed:
            tree = tree.reroot(committed)
            on_path = all(ids[:1] == (t,) for ids, t in zip(ranked, committed, strict=False))
            ranked = ranked[len(committed) :] if on_path else ()
            q = q[len(committed) :]
            self._pools[entry.source].tally.add("rerooted" if tree.num_nodes else "stale")
            if not tree.num_nodes:
                return None
        return Draft(
            source=entry.source,
            base_len=view.base_len,
            tree=tree,
            ranked_ids=ranked,
            latency_s=reply.latency_s,
            was_late=bool(committed),
            q=q,
            drafter_s=reply.drafter_s,
        )

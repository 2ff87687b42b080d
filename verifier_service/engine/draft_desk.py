"""Takes in what drafters answer: events become changes of peers, sessions and sums.

Used by the engine's thread. One broken answer ends one session: nothing that arrives here raises
past this file, and nothing that is not understood is kept.
"""

import logging
import time
from dataclasses import replace

from protos.codec import Malformed
from protos.errors import IncompatiblePair, ProtocolError
from protos.exchange import DraftResult, DraftStatus, PlanKind
from verifier_service.engine.draft_counts import SourceTally
from verifier_service.engine.draft_events import (
    AckIn,
    AnswerBroken,
    AnswerIn,
    Event,
    PeerDown,
    PeerUp,
    ProbeDone,
)
from verifier_service.engine.draft_form import TargetEnd, choose_form
from verifier_service.engine.draft_peer import DraftPeer
from verifier_service.engine.draft_round import DraftRound, Parcel
from verifier_service.engine.session_book import Entry, SessionBook

_logger = logging.getLogger(__name__)

_UNDRAFTED = {
    DraftStatus.LOST: "lost",
    DraftStatus.NOT_READY: "not_ready",
    DraftStatus.REFUSED: "refused",
}


class DraftDesk:
    """Where answers arrive."""

    def __init__(self, target: TargetEnd, book: SessionBook) -> None:
        self._target = target
        self._book = book
        self._seats: dict[int, tuple[DraftPeer, SourceTally]] = {}

    def seat(self, peer: DraftPeer, tally: SourceTally) -> None:
        """From now on this replica's events are taken. May be called from any thread."""
        self._seats[peer.peer_id] = (peer, tally)

    def unseat(self, peer: DraftPeer) -> None:
        """A replica that was left: whatever it still says is passed over."""
        self._seats.pop(peer.peer_id, None)

    def take(self, event: Event, step: DraftRound | None) -> None:
        """Apply one event; `step` is the round being waited for, if one is."""
        seat = self._seats.get(event.peer_id)
        if seat is None:
            return
        peer, tally = seat
        if isinstance(event, AnswerIn):
            self._take_answer(event, peer, tally, step)
        elif isinstance(event, AckIn):
            self._take_ack(event, peer, tally, step)
        elif isinstance(event, PeerUp):
            self._connect(event, peer, tally)
        elif isinstance(event, PeerDown):
            self._disconnect(event, peer, step)
        elif isinstance(event, ProbeDone):
            peer.probed(event.has_answered, time.monotonic())
        elif isinstance(event, AnswerBroken):
            tally.add("malformed")
            _logger.warning("%s at %s: %s", peer.source, peer.address, event.error)

    def count_sent(self, parcel: Parcel) -> None:
        """Note what one replica was sent."""
        _, tally = self._seats[parcel.peer.peer_id]
        asked = sum(work.plan.kind is not PlanKind.NONE for work in parcel.works)
        inline = sum(len(work.rows.data) for work in parcel.works if work.rows is not None)
        tally.add("asked", asked)
        tally.add("feature_bytes", inline + sum(len(p.rows.data) for p in parcel.pieces))

    def close_round(self, step: DraftRound, now_s: float) -> None:
        """The wait is over: count what did not come, and leave the silent alone for a while."""
        for awaited in step.awaited.values():
            self._seats[awaited.peer.peer_id][1].add("unanswered")
        if step.wait_s > 0.0:
            for peer in step.silent_peers():
                peer.fell_silent(now_s)

    def _take_answer(
        self, event: AnswerIn, peer: DraftPeer, tally: SourceTally, step: DraftRound | None
    ) -> None:
        answer = event.answer
        peer.answered()
        drafter_s = answer.queue_s + answer.draft_s
        for malformed in answer.malformed:
            self._drop_malformed(malformed, peer, tally, step)
        for result in answer.results:
            entry = self._book.by_id(result.session_id)
            if entry is None or entry.peer is not peer:
                continue
            try:
                self._take_result(result, answer.step, drafter_s, event.at_s, entry, tally, step)
            except ProtocolError as error:
                self._end(entry, tally, error, step)

    def _take_result(
        self,
        result: DraftResult,
        step_number: int,
        drafter_s: float,
        at_s: float,
        entry: Entry,
        tally: SourceTally,
        step: DraftRound | None,
    ) -> None:
        reply = entry.session.take(result, step_number, at_s)
        session_id = entry.session.session_id
        in_time = step is not None and step.answered(session_id, result.base_len, at_s)
        if result.status in _UNDRAFTED:
            tally.add(_UNDRAFTED[result.status])
            if result.status is DraftStatus.REFUSED:
                _logger.info("%s refused a session: %s", entry.source, result.detail)
                if step is not None:
                    step.give_up_session(session_id)
                self._book.refuse(entry)
        elif reply is not None:
            tally.time_reply(reply.latency_s, drafter_s)
            tally.add("in_time" if in_time else "late")
            newest = entry.session.latest
            if newest is None or newest.result.base_len <= result.base_len:
                entry.session.latest = replace(reply, drafter_s=drafter_s)

    def _take_ack(
        self, event: AckIn, peer: DraftPeer, tally: SourceTally, step: DraftRound | None
    ) -> None:
        peer.piece_taken()
        ack = event.ack
        if ack is None:
            tally.add("malformed")
            return
        entry = self._book.by_id(ack.session_id)
        if entry is None or entry.peer is not peer:
            return
        if ack.incarnation != entry.session.incarnation:
            return
        try:
            entry.session.acknowledge(ack)
        except ProtocolError as error:
            self._end(entry, tally, error, step)

    def _drop_malformed(
        self, malformed: Malformed, peer: DraftPeer, tally: SourceTally, step: DraftRound | None
    ) -> None:
        entry = self._book.by_id(malformed.session_id)
        if entry is None or entry.peer is not peer:
            tally.add("malformed")
        else:
            self._end(entry, tally, malformed.error, step)

    def _end(
        self, entry: Entry, tally: SourceTally, error: ProtocolError, step: DraftRound | None
    ) -> None:
        """A broken answer ends its session; the source is not asked again for this request."""
        tally.add("malformed")
        _logger.warning("%s at %s: session dropped: %s", entry.source, entry.peer.address, error)
        if step is not None:
            step.give_up_session(entry.session.session_id)
        self._book.refuse(entry)

    def _connect(self, event: PeerUp, peer: DraftPeer, tally: SourceTally) -> None:
        trouble = event.trouble
        try:
            form = choose_form(event.capabilities, self._target)
        except IncompatiblePair as error:
            trouble = str(error)
        if trouble:
            if trouble != peer.trouble:
                _logger.warning("%s at %s is not used: %s", peer.source, peer.address, trouble)
                tally.add("pairs_refused")
            peer.trouble, peer.is_up = trouble, True
            return
        for entry in list(self._book.at(peer)):
            if entry.session.form != form:
                self._book.close(entry)
            elif entry.session.incarnation != event.capabilities.incarnation:
                entry.session.reset(event.capabilities.incarnation)
        peer.up(event.capabilities, event.load, form)

    def _disconnect(self, event: PeerDown, peer: DraftPeer, step: DraftRound | None) -> None:
        peer.down()
        _logger.info("%s at %s: %s", peer.source, peer.address, event.reason)
        for entry in self._book.at(peer):
            entry.session.rewind()
        if step is not None:
            step.give_up_on(peer)

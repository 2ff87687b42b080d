"""One replica as the engine's thread sees it: silence, pauses, room, and splitting of messages."""

import pytest

from protos.exchange import Capabilities, ContextRows, DrafterLoad, DraftWork, PlanKind
from protos.features import DType, FeatureRows
from verifier_service.engine.draft_counts import DraftCounts, SourceTally
from verifier_service.engine.draft_form import RowForm
from verifier_service.engine.draft_peer import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_BULK_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_WORKS,
    STUCK_AFTER,
    DraftPeer,
)


class Line:
    """A transport that remembers."""

    def __init__(self):
        self.sent = []
        self.pieces = []
        self.num_probes = 0

    def send(self, step, remaining_s, works):
        self.sent.append((step, list(works)))

    def send_rows(self, piece):
        self.pieces.append(piece)

    def probe(self):
        self.num_probes += 1

    def retire(self):
        pass

    def hang_up(self):
        pass

    def close(self):
        pass


def connected(**limits):
    peer = DraftPeer(1, "fake", "somewhere", is_local=False)
    peer.transport = Line()
    peer.up(Capabilities("fake", "fake", 1, (PlanKind.CHAIN,), **limits), DrafterLoad(), RowForm())
    return peer


def work(session_id, num_tokens=1):
    return DraftWork(session_id, 1, num_tokens, 0, tuple(range(num_tokens)))


def test_silence_is_a_pause_that_grows_to_its_longest():
    peer = connected()
    now = 0.0
    pauses = []
    for _ in range(10):
        peer.fell_silent(now)
        assert not peer.is_usable
        began = now
        probes = peer.transport.num_probes
        while peer.transport.num_probes == probes:
            now += 0.01
            peer.look_after(now)
        pauses.append(round(now - began, 6))
        peer.probed(has_answered=True, now_s=now)
        assert peer.is_usable, "worth another deadline"
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.011)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.011)


def test_one_probe_at_a_time_and_a_failed_one_is_silence():
    peer = connected()
    peer.fell_silent(0.0)
    for _ in range(5):
        peer.look_after(1.0)
    assert peer.transport.num_probes == 1
    peer.probed(has_answered=False, now_s=1.0)
    assert not peer.is_usable
    assert peer.is_stuck is (STUCK_AFTER <= 2)
    peer.look_after(100.0)
    assert peer.transport.num_probes == 2


def test_a_late_answer_ends_the_pause():
    peer = connected()
    peer.fell_silent(0.0)
    peer.fell_silent(1.0)
    assert peer.is_stuck
    peer.answered()
    assert peer.is_usable
    peer.fell_silent(2.0)
    assert not peer.is_stuck, "counted from the start again"


def test_silence_is_noticed_where_nobody_waited():
    peer = connected()
    peer.send(peer.next_step(), 0.0, [work(1)], now_s=10.0)
    peer.look_after(10.0 + LONGEST_PAUSE_S - 0.1)
    assert peer.is_usable
    peer.look_after(10.0 + LONGEST_PAUSE_S + 0.1)
    assert not peer.is_usable
    idle = connected()
    idle.look_after(1e9)
    assert idle.is_usable, "nothing was asked"


def test_a_replica_is_usable_while_up_offered_and_without_trouble():
    peer = connected()
    assert peer.is_usable
    peer.is_offered = False
    assert not peer.is_usable
    peer.is_offered, peer.trouble = True, "another target"
    assert not peer.is_usable
    peer.trouble = ""
    peer.down()
    assert not peer.is_usable


def test_room_is_what_the_record_allows():
    peer = connected(max_sessions=2)
    peer.session_ids = {1}
    assert peer.has_room
    peer.session_ids = {1, 2}
    assert not peer.has_room
    unbounded = connected()
    unbounded.session_ids = set(range(10_000))
    assert unbounded.has_room


def test_large_steps_are_split_and_keep_their_number():
    peer = connected()
    peer.send(5, 0.0, [work(i + 1) for i in range(2 * MAX_WORKS + 1)], now_s=0.0)
    assert [(step, len(works)) for step, works in peer.transport.sent] == [
        (5, MAX_WORKS),
        (5, MAX_WORKS),
        (5, 1),
    ]
    big = connected()
    length = MAX_MESSAGE_BYTES // 5 // 2 + 1
    big.send(1, 0.0, [work(i + 1, length) for i in range(3)], now_s=0.0)
    assert [len(works) for _, works in big.transport.sent] == [1, 1, 1]


def test_unacknowledged_rows_are_bounded():
    peer = connected()
    rows = FeatureRows(0, 1, 1000, DType.BF16, bytes(2000))
    for _ in range(3):
        peer.send_rows(ContextRows(1, 1, rows))
    assert peer.bulk_room == MAX_BULK_BYTES - 6000
    peer.piece_taken()
    assert peer.bulk_room == MAX_BULK_BYTES - 4000
    peer.down()
    assert peer.bulk_room == MAX_BULK_BYTES
    peer.piece_taken()
    assert peer.bulk_room == MAX_BULK_BYTES, "an acknowledgement from before is passed over"


def test_a_replica_that_is_down_cannot_be_told_of_a_close():
    peer = connected()
    peer.session_ids = {7}
    peer.down()
    peer.send_close(work(7))
    assert peer.transport.sent == []
    assert not peer.session_ids


def test_percentiles_are_of_the_newest_replies():
    tally = SourceTally("fake")
    assert tally.percentiles_s() == (0.0, 0.0)
    for _ in range(500):
        tally.time_reply(9.0, 1.0)
    for latency in range(1, 129):
        tally.time_reply(latency / 1000, 0.0)
    p50, p95 = tally.percentiles_s()
    assert p50 == pytest.approx(0.064)
    assert p95 == pytest.approx(0.122, abs=0.001)


def test_counts_add_up_and_wire_time_is_what_the_drafter_did_not_take():
    tally = SourceTally("fake")
    tally.add("asked", 3)
    tally.time_reply(0.010, 0.004)
    tally.time_reply(0.010, 0.040)
    counts = tally.snapshot()
    assert counts.asked == 3
    assert counts.wire_s == pytest.approx(0.006)
    assert (counts + DraftCounts(asked=1)).asked == 4

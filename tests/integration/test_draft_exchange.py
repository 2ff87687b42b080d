"""Verifier and drafter over real gRPC on loopback: the text never depends on the drafter.

The drafter is a fake that keeps sessions in the plainest way and can be turned bad.
"""

import pickle
import struct

import pytest

from protos.exchange import CONTEXT_PIECE_BYTES, INLINE_ROWS_BYTES
from protos.generation import FinishReason
from tests.integration.exchange_house import (
    CHAIN,
    TREE,
    ask,
    featured,
    plain_texts,
    until,
)
from tests.integration.fake_drafter import Mode
from verifier_service.engine.ports import SourcePlan

MALFORMED = (
    Mode.OVERLONG,
    Mode.TOO_DEEP,
    Mode.BAD_PARENT,
    Mode.TWINS,
    Mode.BAD_ID,
    Mode.WRONG_BASE,
    Mode.NAN,
    Mode.SHORT_SCORES,
    Mode.BAD_STATUS,
)
REQUESTS = [ask("a", 5), ask("b", 70), ask("c", 130, temperature=0.8, seed=7), ask("d", 33)]


class BombOnLoad:
    def __reduce__(self):
        return open, (BombOnLoad.path, "w")

    path = ""


@pytest.fixture(scope="module")
def truth():
    return plain_texts(REQUESTS)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_good_drafter_is_believed_and_the_text_stays(start, build, truth, plan):
    drafter = start(capabilities=featured())
    house = build([SourcePlan("fake", plan)])
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    greedy = house.client.last("a").counts
    assert greedy.num_accepted > 0.7 * greedy.num_output
    counts = house.exchange.counts()["fake"]
    assert counts.in_time == counts.asked > 0
    assert counts.malformed == counts.lost == counts.stale == 0
    assert counts.feature_bytes > 0
    assert 0.0 < counts.drafter_s < counts.reply_s


@pytest.mark.parametrize("mode", MALFORMED)
def test_a_malformed_draft_ends_one_session_and_never_the_text(start, build, truth, mode):
    drafter = start()
    drafter.mode = mode
    house = build([SourcePlan("fake", TREE)])
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    counts = house.exchange.counts()["fake"]
    assert counts.malformed == len(REQUESTS)
    assert counts.in_time == 0
    assert all(house.client.last(r.request_id).counts.num_drafted == 0 for r in REQUESTS)
    assert drafter.num_streams == 1, "the stream itself went on"
    until(lambda: not drafter.sessions)
    drafter.mode = Mode.GOOD
    house.client.submit(ask("after"))
    house.client.finish()
    assert house.client.last("after").counts.num_accepted > 0


@pytest.mark.parametrize("mode", [Mode.RANDOM, Mode.STRANGER, Mode.FLOOD, Mode.REFUSES])
def test_lies_and_noise_change_nothing(start, build, truth, mode):
    drafter = start()
    drafter.mode = mode
    house = build([SourcePlan("fake", CHAIN)], deadline_s=0.1)
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth


def test_a_torrent_of_answers_neither_holds_a_step_nor_fills_the_memory(start, build, truth):
    drafter = start()
    drafter.mode = Mode.TORRENT
    house = build([SourcePlan("fake", CHAIN)], deadline_s=0.05)
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    drafter.mode = Mode.GOOD
    house.wait_for("fake")


def test_a_refusal_is_taken_once_per_request(start, build):
    drafter = start()
    drafter.mode = Mode.REFUSES
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address)
    house.client.submit(ask("a"))
    house.client.finish()
    assert house.exchange.counts()["fake"].refused == 1
    assert drafter.num_works <= 3, "its open, its first plan and its close at most"


def test_pickled_bytes_in_every_bytes_field_do_nothing(start, build, truth, tmp_path):
    BombOnLoad.path = str(tmp_path / "bomb")
    drafter = start(hostile_bytes=pickle.dumps(BombOnLoad()))
    drafter.mode = Mode.PICKLE
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    assert house.exchange.counts()["fake"].malformed >= len(REQUESTS)
    assert not (tmp_path / "bomb").exists()


def test_silence_costs_a_deadline_and_drafting_comes_back(start, build, truth):
    drafter = start()
    house = build([SourcePlan("fake", CHAIN)], deadline_s=0.05)
    house.offer("fake", drafter.address)
    drafter.mode = Mode.SILENT
    house.client.submit(REQUESTS[0])
    while not house.exchange.counts()["fake"].unanswered:
        house.engine.step()
    assert house.exchange.sources() == [], "a silent drafter is left alone"
    assert house.client.finish()["a"] == truth["a"]
    drafter.mode = Mode.GOOD
    house.wait_for("fake")
    for request in REQUESTS[1:]:
        house.client.submit(request)
    assert house.client.finish() == truth
    assert house.client.last("b").counts.num_accepted > 0


def test_late_drafts_are_rerooted_and_still_count(start, build, truth):
    drafter = start()
    drafter.mode, drafter.delay_s = Mode.LATE, 0.03
    house = build([SourcePlan("fake", TREE)], deadline_s=0.005)
    house.offer("fake", drafter.address)
    house.client.submit(REQUESTS[0])

    def arrived():
        house.exchange.sources()
        counts = house.exchange.counts()["fake"]
        has_ended = any(run.finish_reason for run in house.client.runs["a"])
        return has_ended or counts.in_time + counts.late == counts.asked

    while house.engine.step():
        until(arrived)
    assert house.client.texts()["a"] == truth["a"]
    counts = house.exchange.counts()["fake"]
    assert counts.late > 0
    # A late draft that is used commits its whole path, so the next one has nothing left below it.
    assert counts.rerooted >= counts.stale > 0
    assert house.client.last("a").counts.num_accepted > 0


def test_drafts_that_come_too_late_are_stale(start, build, truth):
    drafter = start()
    drafter.mode, drafter.delay_s = Mode.LATE, 0.1
    house = build([SourcePlan("fake", CHAIN)], deadline_s=0.001)
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    counts = house.exchange.counts()["fake"]
    assert counts.unanswered >= len(REQUESTS)
    assert counts.in_time + counts.late <= counts.asked


def test_a_forgetful_drafter_is_told_again(start, build, truth):
    drafter = start(capabilities=featured())
    drafter.mode = Mode.FORGETFUL
    house = build([SourcePlan("fake", TREE)])
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    assert house.exchange.counts()["fake"].lost > 0
    assert drafter.num_opens > len(REQUESTS)
    assert house.client.last("a").counts.num_accepted > 0


def test_a_drafter_that_denies_its_rows_is_given_up(start, build, truth):
    drafter = start(capabilities=featured())
    drafter.mode = Mode.DENIES_ROWS
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == truth
    assert house.exchange.counts()["fake"].malformed == len(REQUESTS)


def test_rows_held_by_the_drafter_are_the_rows_of_its_tokens(start, build):
    drafter = start(capabilities=featured())
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address)
    house.client.submit(ask("a", 700, max_tokens=30))
    while not house.client.runs["a"] or len(house.client.ids("a")) < 20:
        house.engine.step()
    (session,) = drafter.sessions.values()
    assert len(session.rows) == len(session.tokens) - 1
    expected = [struct.pack("<ff", token, t) for t, token in enumerate(session.tokens[:-1])]
    assert session.rows == expected


def test_rows_of_a_long_prompt_cross_in_pieces(start, build):
    width = 288
    drafter = start(capabilities={"raw_width": width, "digest": "digest"})
    house = build([SourcePlan("fake", CHAIN)], row_width=width)
    house.offer("fake", drafter.address)
    house.client.submit(ask("long", 8000, max_tokens=60))
    seen_rows = 0
    while house.engine.step():
        held = [len(session.rows) for session in drafter.sessions.values()]
        seen_rows = max([seen_rows, *held])
    assert len(drafter.piece_bytes) >= 8000 * width * 4 / CONTEXT_PIECE_BYTES - 1
    assert max(drafter.piece_bytes) <= CONTEXT_PIECE_BYTES
    assert max(drafter.inline_bytes) <= INLINE_ROWS_BYTES
    assert seen_rows >= 7999
    assert house.client.last("long").counts.num_accepted > 0


def test_sessions_end_with_their_requests(start, build):
    drafter = start()
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address)
    for request in REQUESTS:
        house.client.submit(request)
    house.client.finish()
    until(lambda: not drafter.sessions)
    assert drafter.num_opens == drafter.num_closes == len(REQUESTS)
    assert len(drafter.verifiers) == 1


def test_a_cancelled_request_closes_its_session(start, build):
    drafter = start()
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address)
    house.client.submit(ask("a", max_tokens=500))
    for _ in range(5):
        house.engine.step()
    assert len(drafter.sessions) == 1
    house.engine.cancel(house.client.keys["a"])
    house.engine.step()
    assert house.client.last("a").finish_reason is FinishReason.CANCELLED
    until(lambda: not drafter.sessions)

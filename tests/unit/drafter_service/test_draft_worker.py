"""The computing thread: what waits is drafted together, drafts go before rows."""

import threading

import pytest
import torch

from drafter_service.worker import ROWS_PER_SLICE, DraftWorker
from protos.exchange import (
    ContextAck,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftStatus,
    PlanKind,
)
from tests.unit.drafter_service.drafter_cases import rows_of, work

WAIT_S = 10.0


class Recorder:
    """A drafter that notes what it was asked, and can be held inside a call."""

    def __init__(self):
        self.calls = []
        self.gate = threading.Event()
        self.inside = threading.Event()
        self.capabilities = None

    def handle(self, works):
        self.inside.set()
        assert self.gate.wait(WAIT_S)
        self.calls.append(("draft", [w.session_id for w in works], [w.plan.kind for w in works]))
        return [
            DraftResult(w.session_id, 1, w.base_len, DraftStatus.OK) for w in works if not w.close
        ]

    def absorb(self, pieces):
        (piece,) = pieces
        self.calls.append(("rows", piece.rows.start, piece.rows.end))
        return [ContextAck(piece.session_id, 1, piece.rows.end)]

    def load(self):
        return DrafterLoad()

    def expire(self, now):
        return 0


@pytest.fixture
def parts():
    drafter = Recorder()
    worker = DraftWorker(drafter)
    worker.start()
    yield drafter, worker
    drafter.gate.set()
    worker.stop()


class Answers:
    """Collects callbacks."""

    def __init__(self, count):
        self.got = {}
        self._left = threading.Semaphore(0)
        self._count = count

    def at(self, name):
        def done(value):
            self.got[name] = value
            self._left.release()

        return done

    def wait(self):
        for _ in range(self._count):
            assert self._left.acquire(timeout=WAIT_S)
        return self.got


def hold_with(drafter, worker, answers):
    """Keep the thread inside a first call, so that what follows piles up."""
    worker.draft([work(1, [1], session_id=99)], answers.at("first"))
    assert drafter.inside.wait(WAIT_S)


def test_messages_that_wait_are_drafted_in_one_call(parts):
    drafter, worker = parts
    answers = Answers(3)
    hold_with(drafter, worker, answers)
    worker.draft([work(1, [1], session_id=1), work(1, [1], session_id=2)], answers.at("a"))
    worker.draft([work(1, [1], session_id=3)], answers.at("b"))
    assert worker.load().num_waiting == 3
    drafter.gate.set()
    got = answers.wait()
    assert [call[1] for call in drafter.calls] == [[99], [1, 2, 3]]
    assert [r.session_id for r in got["a"].results] == [1, 2]
    assert [r.session_id for r in got["b"].results] == [3]


def test_a_draft_goes_before_rows_that_waited_longer(parts):
    drafter, worker = parts
    answers = Answers(3)
    hold_with(drafter, worker, answers)
    rows = rows_of(torch.zeros(2 * ROWS_PER_SLICE + 1, 2))
    worker.absorb(ContextRows(1, 1, rows), answers.at("ack"))
    worker.draft([work(1, [1], session_id=1)], answers.at("draft"))
    drafter.gate.set()
    got = answers.wait()
    assert [call[0] for call in drafter.calls] == ["draft", "draft", "rows", "rows", "rows"]
    assert got["ack"].held_rows == rows.end


def test_rows_do_not_starve_while_drafts_go_on_arriving(monkeypatch, parts):
    drafter, worker = parts
    monkeypatch.setattr("drafter_service.worker.MAX_ROWS_WAIT_S", 0.0)
    drafter.gate.set()
    answers = Answers(1)
    again = threading.Event()

    def keep_drafting(_):
        if not again.is_set():
            worker.draft([work(1, [1], session_id=1)], keep_drafting)

    keep_drafting(None)
    rows = rows_of(torch.zeros(ROWS_PER_SLICE, 2))
    worker.absorb(ContextRows(1, 1, rows), answers.at("ack"))
    assert answers.wait()["ack"].held_rows == ROWS_PER_SLICE
    again.set()


def test_a_work_that_is_overtaken_only_brings_its_tokens(parts):
    drafter, worker = parts
    answers = Answers(3)
    hold_with(drafter, worker, answers)
    worker.draft([work(1, [1], session_id=1)], answers.at("old"))
    worker.draft([work(1, [2], session_id=1, token_start=1)], answers.at("new"))
    drafter.gate.set()
    got = answers.wait()
    assert drafter.calls[1][2] == [PlanKind.NONE, PlanKind.CHAIN]
    assert got["old"].results[0].status is DraftStatus.NOT_READY
    assert got["new"].results[0].status is DraftStatus.OK
    assert worker.metrics.snapshot()["num_superseded"] == 1


def test_closes_are_passed_on_without_an_answer(parts):
    drafter, worker = parts
    drafter.gate.set()
    answers = Answers(1)
    close = work(1, [], session_id=1, token_start=1, close=True)
    worker.draft([close, work(1, [1], session_id=2)], answers.at("a"))
    assert [r.session_id for r in answers.wait()["a"].results] == [2]


def test_stopping_ends_the_thread_while_nothing_waits(parts):
    _, worker = parts
    worker.stop()
    assert not worker.is_alive

"""The prefix rule's bookkeeping on the verifier's side: what is owed after every kind of loss.

`Mirror` is a drafter's session in its plainest form; whatever happens on the way, it ends up with
exactly the request's tokens and rows.
"""

import random
from dataclasses import replace

import pytest

from protos.errors import ProtocolError
from protos.exchange import (
    CONTEXT_PIECE_BYTES,
    ContextAck,
    DraftResult,
    DraftStatus,
    Plan,
    PlanKind,
)
from protos.features import DType, FeatureForm, FeatureRows
from protos.generation import Speculation
from protos.params import SamplingParams
from protos.plans import nodes_asked
from protos.tree import CandidateTree, chain
from verifier_service.engine.draft_form import RowForm
from verifier_service.engine.draft_session import (
    MAX_LOSSES,
    DraftSession,
    Question,
    RowsMissing,
)
from verifier_service.engine.ports import SequenceView

WIDTH = 256
FORM = RowForm(FeatureForm.RAW, WIDTH, DType.FP16, "tap")
ROW_BYTES = WIDTH * 2
CHAIN = Plan(PlanKind.CHAIN, depth=3)


def view(length, num_rows=None, decoding=True):
    return SequenceView(
        key=1,
        request_id="r",
        tokens=list(range(length)),
        num_rows=length - 1 if num_rows is None else num_rows,
        params=SamplingParams(),
        speculation=Speculation(),
        remaining=100,
        decoding=decoding,
    )


def row(position):
    return position.to_bytes(4, "little") * (ROW_BYTES // 4)


def read_rows(key, tap, start, end):
    assert (key, tap) == (1, "tap")
    data = b"".join(row(position) for position in range(start, end))
    return FeatureRows(start, end - start, WIDTH, DType.FP16, data)


class Mirror:
    """What the other end holds."""

    def __init__(self, incarnation=7):
        self.incarnation = incarnation
        self.tokens = None
        self.rows = []

    def take(self, work):
        """Returns the answer to a work."""
        if work.incarnation == self.incarnation and work.open is not None:
            self.tokens, self.rows = [], []
        if work.incarnation != self.incarnation or self.tokens is None:
            return self.answer(work, DraftStatus.LOST)
        if work.token_start > len(self.tokens):
            return self.answer(work, DraftStatus.LOST)
        self.tokens[work.token_start :] = work.tokens
        if work.rows is not None:
            self.hold(work.rows)
        tree = CandidateTree() if work.plan.kind is PlanKind.NONE else chain([5, 6])
        return self.answer(work, DraftStatus.OK, tree)

    def absorb(self, piece):
        """Returns the acknowledgement of a piece."""
        if piece.incarnation != self.incarnation or self.tokens is None:
            return ContextAck(piece.session_id, self.incarnation, 0, lost=True)
        self.hold(piece.rows)
        return ContextAck(piece.session_id, self.incarnation, len(self.rows))

    def hold(self, rows):
        if rows.start <= len(self.rows):
            size = ROW_BYTES
            cut = [rows.data[i * size : (i + 1) * size] for i in range(rows.count)]
            self.rows[rows.start :] = cut

    def answer(self, work, status, tree=None):
        return DraftResult(
            work.session_id,
            self.incarnation,
            work.base_len,
            status,
            len(self.tokens or ()),
            len(self.rows),
            tree or CandidateTree(),
        )

    def holds(self, length):
        expected = [row(position) for position in range(length - 1)]
        return self.tokens == list(range(length)) and self.rows == expected


def session(form=FORM):
    return DraftSession(99, 7, form)


def work_of(one, length, step, plan=CHAIN, inline_bytes=10 * ROW_BYTES, **changes):
    return one.work(view(length, **changes), Question(plan, step, 0.0), read_rows, inline_bytes)


def test_the_first_work_opens_and_carries_everything():
    one = session()
    work = work_of(one, 6, step=1)
    assert work.open is not None
    assert (work.open.form, work.open.width, work.open.dtype) == ("raw", WIDTH, DType.FP16)
    assert (work.token_start, work.tokens, work.base_len) == (0, (0, 1, 2, 3, 4, 5), 6)
    assert (work.rows.start, work.rows.end) == (0, 5)


def test_later_works_carry_what_is_new():
    one, mirror = session(), Mirror()
    one.take(mirror.take(work_of(one, 6, step=1)), 1, 0.1)
    work = work_of(one, 9, step=2)
    assert work.open is None
    assert (work.token_start, work.tokens) == (6, (6, 7, 8))
    assert (work.rows.start, work.rows.end) == (5, 8)
    mirror.take(work)
    assert mirror.holds(9)


def test_rows_never_reach_the_anchor():
    work = work_of(session(), 6, step=1, num_rows=6)
    assert work.rows.end == 5


def test_a_session_without_features_sends_none():
    one = session(RowForm())
    work = work_of(one, 6, step=1)
    assert work.rows is None
    assert work.open.form is FeatureForm.NONE
    one.take(Mirror().take(work), 1, 0.0)
    assert list(one.bulk(view(6), read_rows, 10**9)) == []


def test_many_rows_wait_for_the_open_and_go_in_pieces():
    one, mirror = session(), Mirror()
    work = work_of(one, 2000, step=1)
    assert work.rows is None
    assert list(one.bulk(view(2000), read_rows, 10**9)) == [], "not before the open is confirmed"
    one.take(mirror.take(work), 1, 0.0)
    pieces = list(one.bulk(view(2000), read_rows, 10**9))
    assert [piece.rows.start for piece in pieces[1:]] == [p.rows.end for p in pieces[:-1]]
    assert all(len(piece.rows.data) <= CONTEXT_PIECE_BYTES for piece in pieces)
    for piece in pieces:
        one.acknowledge(mirror.absorb(piece))
    assert mirror.holds(2000)
    assert one.rows_held == 1999


def test_the_budget_of_a_step_bounds_what_is_read():
    one = session()
    one.take(Mirror().take(work_of(one, 5000, step=1)), 1, 0.0)
    budget = 2 * CONTEXT_PIECE_BYTES
    sent = sum(len(piece.rows.data) for piece in one.bulk(view(5000), read_rows, budget))
    assert budget <= sent < budget + CONTEXT_PIECE_BYTES
    assert list(one.bulk(view(5000), read_rows, 0)) == []


def test_no_rows_ride_inline_while_pieces_are_under_way():
    one, mirror = session(), Mirror()
    one.take(mirror.take(work_of(one, 600, step=1)), 1, 0.0)
    pieces = list(one.bulk(view(600), read_rows, 10**9))
    assert work_of(one, 602, step=2).rows is None
    for piece in pieces:
        one.acknowledge(mirror.absorb(piece))
    assert work_of(one, 603, step=3).rows.start == 599


def test_rows_that_do_not_exist_are_not_invented():
    with pytest.raises(RowsMissing):
        session().work(view(6), Question(CHAIN, 1, 0.0), lambda *_: None, None)


def test_an_answer_in_time_is_the_reply_to_its_plan():
    one, mirror = session(), Mirror()
    reply = one.take(mirror.take(work_of(one, 6, step=1)), 1, 0.25)
    assert reply.result.tree == chain([5, 6])
    assert (reply.question.plan, reply.latency_s) == (CHAIN, 0.25)


def test_an_answer_to_an_absorbing_work_is_no_draft():
    one, mirror = session(), Mirror()
    assert one.take(mirror.take(work_of(one, 6, 1, plan=Plan())), 1, 0.1) is None
    assert one.is_confirmed


def test_a_lost_session_is_opened_again_from_the_start():
    one, mirror = session(), Mirror()
    one.take(mirror.take(work_of(one, 6, step=1)), 1, 0.1)
    mirror.tokens = None
    mirror.rows = []
    assert one.take(mirror.take(work_of(one, 8, step=2)), 2, 0.1) is None
    work = work_of(one, 9, step=3)
    assert work.open is not None
    mirror.take(work)
    assert mirror.holds(9)


def test_a_part_that_is_held_is_not_sent_again():
    one, mirror = session(), Mirror()
    one.take(mirror.take(work_of(one, 8, step=1)), 1, 0.1)
    del mirror.tokens[5:], mirror.rows[4:]
    one.take(mirror.take(work_of(one, 9, step=2)), 2, 0.1)
    work = work_of(one, 10, step=3)
    assert work.open is None
    assert (work.token_start, work.rows.start) == (5, 4)
    mirror.take(work)
    assert mirror.holds(10)


def test_losses_of_works_on_their_way_are_one_loss():
    """Two works were sent before the first answer came; the second LOST says nothing new."""
    one = session()
    mirror = Mirror(incarnation=8)
    first, second = work_of(one, 6, step=1), work_of(one, 7, step=2)
    one.take(mirror.take(first), 1, 0.1)
    assert one.incarnation == 8
    again = work_of(one, 8, step=3)
    one.take(mirror.take(second), 2, 0.1)
    assert one.is_open, "the new open is not thrown away"
    one.take(mirror.take(again), 3, 0.1)
    assert mirror.holds(8)


def test_a_session_that_is_always_lost_is_given_up():
    one, mirror = session(), Mirror()

    def lose():
        for step in range(1, MAX_LOSSES + 3):
            mirror.tokens = None
            work = replace(work_of(one, 5 + step, step=step), open=None)
            one.take(mirror.take(work), step, 0.1)

    with pytest.raises(ProtocolError, match="lost"):
        lose()


def test_rows_that_are_never_held_are_given_up():
    one, mirror = session(), Mirror()

    def deny():
        for step in range(1, MAX_LOSSES + 3):
            answer = mirror.take(work_of(one, 5 + step, step=step))
            one.take(replace(answer, held_rows=0), step, 0.1)

    with pytest.raises(ProtocolError, match="rows"):
        deny()


def test_a_broken_connection_owes_what_was_not_confirmed():
    one, mirror = session(), Mirror()
    one.take(mirror.take(work_of(one, 6, step=1)), 1, 0.1)
    work_of(one, 9, step=2)
    one.rewind()
    work = work_of(one, 10, step=3)
    assert (work.token_start, work.rows.start, work.open) == (6, 5, None)
    mirror.take(work)
    assert mirror.holds(10)


def test_a_new_incarnation_holds_nothing():
    one = session()
    one.take(Mirror().take(work_of(one, 6, step=1)), 1, 0.1)
    one.reset(8)
    work = work_of(one, 7, step=2)
    assert (work.incarnation, work.token_start) == (8, 0)
    assert work.open is not None


@pytest.mark.parametrize(
    "spoil",
    [
        {"base_len": 99},
        {"tree": chain([1, 2, 3, 4])},
        {"tree": CandidateTree((1, 2), (0, 0), (0.0, 0.0))},
    ],
    ids=["never asked", "longer than its plan", "no chain"],
)
def test_an_answer_that_nothing_asked_for_is_malformed(spoil):
    one, mirror = session(), Mirror()
    answer = mirror.take(work_of(one, 6, step=1))
    with pytest.raises(ProtocolError):
        one.take(replace(answer, **spoil), 1, 0.1)


def test_the_same_question_is_answered_once():
    one, mirror = session(), Mirror()
    answer = mirror.take(work_of(one, 6, step=1))
    assert one.take(answer, 1, 0.1) is not None
    assert one.take(answer, 1, 0.2) is None


def test_closing_names_what_was_sent():
    one = session()
    work_of(one, 6, step=1)
    work = one.close_work()
    assert (work.session_id, work.base_len, work.token_start, work.tokens) == (99, 6, 6, ())
    assert work.close


@pytest.mark.parametrize(
    ("plan", "most"),
    [
        (Plan(), 0),
        (Plan(PlanKind.CHAIN, depth=4, nodes=99), 4),
        (Plan(PlanKind.TREE, depth=4, width=2, nodes=9), 9),
        (Plan(PlanKind.BLOCK, depth=8), 8),
        (Plan(PlanKind.BLOCK, depth=8, nodes=20), 20),
    ],
)
def test_a_plan_bounds_its_draft(plan, most):
    assert nodes_asked(plan) == most


@pytest.mark.parametrize("seed", range(25))
def test_any_interleaving_of_losses_ends_with_the_whole_prefix(seed):
    """Answers late, dropped connections, evictions, lost pieces: then a quiet line."""
    rng = random.Random(seed)
    one, mirror = session(), Mirror()
    length = rng.randint(2, 900)
    answers, acks = [], []
    for step in range(1, 61):
        is_quiet = step > 50
        length += rng.randint(1, 5)
        inline = 8 * ROW_BYTES
        work = one.work(view(length), Question(CHAIN, step, 0.0), read_rows, inline)
        answers.append((mirror.take(work), step))
        for piece in one.bulk(view(length), read_rows, 2 * CONTEXT_PIECE_BYTES):
            acks.append(mirror.absorb(piece))
        event = rng.random()
        if not is_quiet and event < 0.08:
            mirror.tokens, mirror.rows = None, []
        elif not is_quiet and event < 0.16:
            one.rewind()
            answers.clear()
            acks.clear()
        elif not is_quiet and event < 0.2:
            mirror = Mirror(mirror.incarnation + 1)
            answers.clear()
            acks.clear()
            one.reset(mirror.incarnation)
        if is_quiet or rng.random() < 0.6:
            for answer, of_step in answers:
                one.take(answer, of_step, 0.1)
            for ack in acks:
                one.acknowledge(ack)
            answers.clear()
            acks.clear()
    assert mirror.holds(length)

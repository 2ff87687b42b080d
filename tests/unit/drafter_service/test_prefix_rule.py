"""The prefix rule, on the drafter that needs tokens only."""

from dataclasses import replace

import pytest

from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.ngram import Ngram
from drafter_service.service import SessionDrafter
from drafter_service.session import MAX_ROWS_AHEAD, Session
from protos.errors import MalformedRows
from protos.exchange import ContextRows, DraftStatus, Plan, PlanKind
from protos.features import DType, FeatureForm, FeatureRows
from tests.unit.drafter_service.drafter_cases import ABSORB, CHAIN4, opening, tokens_only, work

PROMPT = [5, 6, 7, 8, 5, 6]


def ngram(**limits):
    return build_drafter(DrafterSettings(kind="ngram", limits=DrafterLimits(**limits)))


@pytest.fixture
def drafter():
    return ngram()


def opened(drafter, tokens=PROMPT, **kwargs):
    given = work(drafter.capabilities.incarnation, tokens, open=tokens_only(), **kwargs)
    return drafter.handle([given])[0]


def extended(drafter, tokens, token_start, **kwargs):
    given = work(drafter.capabilities.incarnation, tokens, token_start=token_start, **kwargs)
    return drafter.handle([given])[0]


def test_opening_drafts_in_the_same_round(drafter):
    result = opened(drafter)
    assert result.status is DraftStatus.OK
    assert result.tree.tokens == (7, 8, 5, 6)
    assert (result.base_len, result.held_tokens) == (6, 6)


def test_extending_appends_committed_tokens(drafter):
    opened(drafter)
    result = extended(drafter, [7], 6)
    assert result.status is DraftStatus.OK
    assert result.tree.tokens == (8, 5, 6, 7)


def test_unknown_session_is_lost_with_nothing_held(drafter):
    result = extended(drafter, [7], 6)
    assert (result.status, result.held_tokens, result.held_rows) == (DraftStatus.LOST, 0, 0)


def test_gap_in_tokens_is_lost_and_tells_what_is_held(drafter):
    opened(drafter)
    result = extended(drafter, [9], 8)
    assert (result.status, result.held_tokens) == (DraftStatus.LOST, 6)
    # The session is still good for the prefix it holds.
    assert extended(drafter, [7], 6).status is DraftStatus.OK


def test_tokens_sent_again_are_tolerated(drafter):
    opened(drafter)
    result = extended(drafter, [5, 6, 7], 4)
    assert (result.status, result.held_tokens) == (DraftStatus.OK, 7)


def test_tokens_that_disagree_are_lost_back_to_what_both_hold(drafter):
    opened(drafter)
    result = extended(drafter, [5, 9, 9], 4)
    assert (result.status, result.held_tokens) == (DraftStatus.LOST, 5)
    assert extended(drafter, [9, 9], 5).status is DraftStatus.OK


def test_reopening_from_what_is_held_continues(drafter):
    opened(drafter)
    again = work(drafter.capabilities.incarnation, [7], token_start=6, open=tokens_only())
    result = drafter.handle([again])[0]
    assert (result.status, result.held_tokens) == (DraftStatus.OK, 7)
    assert result.tree.tokens == (8, 5, 6, 7)


def test_reopening_may_shorten(drafter):
    opened(drafter)
    again = work(drafter.capabilities.incarnation, [8, 5], token_start=3, open=tokens_only())
    result = drafter.handle([again])[0]
    assert (result.status, result.held_tokens) == (DraftStatus.OK, 5)
    assert result.tree.tokens == (6, 7, 8, 5)


def test_reopening_beyond_what_is_held_is_lost(drafter):
    again = work(drafter.capabilities.incarnation, [7], token_start=6, open=tokens_only())
    assert drafter.handle([again])[0].status is DraftStatus.LOST


def test_stale_incarnation_is_lost_and_learns_the_new_one(drafter):
    opened(drafter)
    result = drafter.handle([work(1234, [7], token_start=6)])[0]
    assert result.status is DraftStatus.LOST
    assert result.incarnation == drafter.capabilities.incarnation
    assert extended(drafter, [7], 6).status is DraftStatus.OK


def test_stale_close_closes_nothing(drafter):
    opened(drafter)
    assert drafter.handle([work(1234, [], token_start=6, close=True)]) == []
    assert drafter.load().num_sessions == 1


def test_close_is_not_answered_and_forgets(drafter):
    opened(drafter)
    close = work(drafter.capabilities.incarnation, [], token_start=6, close=True)
    assert drafter.handle([close, replace(close, session_id=77)]) == []
    assert drafter.load().num_sessions == 0
    assert extended(drafter, [7], 6).status is DraftStatus.LOST


def test_results_follow_the_order_of_works(drafter):
    incarnation = drafter.capabilities.incarnation
    works = [
        work(incarnation, PROMPT, session_id=1, open=tokens_only()),
        work(incarnation, [1], session_id=2, token_start=3),
        work(incarnation, [], session_id=3, token_start=1, close=True),
        work(incarnation, PROMPT, session_id=4, open=tokens_only()),
    ]
    results = drafter.handle(works)
    assert [(r.session_id, r.status) for r in results] == [
        (1, DraftStatus.OK),
        (2, DraftStatus.LOST),
        (4, DraftStatus.OK),
    ]


def test_two_works_of_one_session_are_each_drafted_for_their_own_prefix(drafter):
    incarnation = drafter.capabilities.incarnation
    first = work(incarnation, PROMPT, open=tokens_only())
    second = work(incarnation, [7], token_start=6)
    results = drafter.handle([first, second])
    assert [r.base_len for r in results] == [6, 7]
    assert [r.tree.tokens[0] for r in results] == [7, 8]


def test_absorb_only_plan_drafts_nothing(drafter):
    result = opened(drafter, plan=ABSORB)
    assert (result.status, result.tree.num_nodes) == (DraftStatus.OK, 0)


@pytest.mark.parametrize(
    ("tokens", "token_start", "detail"),
    [([-1], 0, "token ids"), ([], 0, "1 to 64"), (list(range(65)), 0, "1 to 64")],
)
def test_malformed_work_ends_its_session_alone(tokens, token_start, detail):
    drafter = ngram(max_context=64)
    incarnation = drafter.capabilities.incarnation
    bad = work(incarnation, tokens, session_id=2, token_start=token_start, open=tokens_only())
    good = work(incarnation, PROMPT, session_id=1, open=tokens_only())
    refused, answered = drafter.handle([bad, good])
    assert refused.status is DraftStatus.REFUSED
    assert detail in refused.detail
    assert answered.status is DraftStatus.OK
    assert drafter.load().num_sessions == 1


def test_base_len_that_contradicts_the_tokens_is_refused(drafter):
    given = work(drafter.capabilities.incarnation, PROMPT, open=tokens_only())
    assert drafter.handle([replace(given, base_len=9)])[0].status is DraftStatus.REFUSED


def test_rows_are_refused_by_a_drafter_of_tokens(drafter):
    given = work(
        drafter.capabilities.incarnation, PROMPT, open=opening(FeatureForm.RAW, 4, DType.FP32)
    )
    assert drafter.handle([given])[0].status is DraftStatus.REFUSED


@pytest.mark.parametrize(
    "plan",
    [
        Plan(kind=PlanKind.BLOCK, depth=4),
        Plan(kind=PlanKind.CHAIN, depth=0),
        Plan(kind=PlanKind.CHAIN, depth=17),
        Plan(kind=PlanKind.TREE, depth=4, width=99, nodes=8),
        Plan(kind=PlanKind.TREE, depth=4, width=2, nodes=0),
    ],
)
def test_plan_beyond_the_capabilities_is_refused_but_keeps_the_session(drafter, plan):
    assert opened(drafter, plan=plan).status is DraftStatus.REFUSED
    assert extended(drafter, [7], 6).status is DraftStatus.OK


def test_least_recently_used_session_makes_room():
    drafter = ngram(max_sessions=2)
    for session_id in (1, 2):
        opened(drafter, session_id=session_id)
    extended(drafter, [7], 6, session_id=1)
    opened(drafter, session_id=3)
    assert extended(drafter, [8], 7, session_id=1).status is DraftStatus.OK
    assert extended(drafter, [7], 6, session_id=2).status is DraftStatus.LOST


def test_no_room_when_all_sessions_are_in_one_message():
    drafter = ngram(max_sessions=2)
    incarnation = drafter.capabilities.incarnation
    works = [work(incarnation, PROMPT, session_id=i, open=tokens_only()) for i in range(3)]
    statuses = [result.status for result in drafter.handle(works)]
    assert statuses == [DraftStatus.OK, DraftStatus.OK, DraftStatus.REFUSED]


def test_idle_sessions_expire_and_used_ones_stay():
    now = [0.0]
    base = ngram()
    drafter = SessionDrafter(base.capabilities, Ngram(), idle_s=10.0, clock=lambda: now[0])
    opened(drafter, session_id=1)
    opened(drafter, session_id=2)
    now[0] = 8.0
    extended(drafter, [7], 6, session_id=2)
    assert drafter.expire(11.0) == 1
    assert drafter.load().num_sessions == 1
    assert drafter.expire(100.0) == 1


def test_context_rows_for_an_unknown_session_are_acknowledged_as_lost(drafter):
    rows = FeatureRows(0, 1, 1, DType.FP32, b"\0\0\0\0")
    ack = drafter.absorb([ContextRows(9, drafter.capabilities.incarnation, rows)])[0]
    assert ack.lost
    assert ack.held_rows == 0


def numbered(start, end):
    """One-byte-distinguishable rows of width 1: row t holds float t."""
    import struct

    return FeatureRows(
        start, end - start, 1, DType.FP32, struct.pack(f"<{end - start}f", *range(start, end))
    )


def session_of(num_tokens):
    session = Session(1, opening(FeatureForm.RAW, 1, DType.FP32))
    session.extend(tuple(range(num_tokens)))
    return session


def values(pieces):
    import struct

    return [v for piece in pieces for v in struct.unpack(f"<{piece.count}f", piece.data)]


def test_rows_out_of_order_are_not_held():
    session = session_of(10)
    session.add_rows(numbered(4, 6))
    assert session.num_rows == 0
    session.add_rows(numbered(0, 4))
    assert session.num_rows == 4


def test_rows_sent_twice_or_overlapping_are_held_once():
    session = session_of(10)
    for start, end in [(0, 4), (0, 4), (2, 6), (1, 3)]:
        session.add_rows(numbered(start, end))
    assert session.num_rows == 6
    assert values(session.take_rows(100)) == [0, 1, 2, 3, 4, 5]


def test_rows_are_usable_only_with_the_token_after_them():
    session = session_of(3)
    session.add_rows(numbered(0, 6))
    assert session.num_rows == 6
    assert values(session.take_rows(100)) == [0, 1]
    session.extend((3, 4))
    assert values(session.take_rows(1)) == [2]
    assert values(session.take_rows(100)) == [3]
    assert session.computed_len == 4


def test_rows_far_ahead_of_their_tokens_are_cut():
    session = session_of(2)
    session.add_rows(numbered(0, MAX_ROWS_AHEAD + 100))
    assert session.num_rows == 2 + MAX_ROWS_AHEAD


def test_shortening_asks_for_used_rows_again_and_keeps_unused_ones():
    session = session_of(6)
    session.add_rows(numbered(0, 5))
    session.truncate(4)
    assert session.num_rows == 4
    session.take_rows(100)
    session.truncate(2)
    assert (session.computed_len, session.num_rows) == (1, 1)


def test_rows_of_another_shape_are_malformed():
    session = session_of(4)
    with pytest.raises(MalformedRows):
        session.add_rows(FeatureRows(0, 1, 2, DType.FP32, bytes(8)))
    with pytest.raises(MalformedRows):
        session.add_rows(FeatureRows(0, 1, 1, DType.BF16, bytes(2)))


def test_chain_plan_ignores_width_and_nodes(drafter):
    assert opened(drafter, plan=replace(CHAIN4, width=0, nodes=0)).tree.num_nodes == 4

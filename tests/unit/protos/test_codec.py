"""What is encoded decodes to the same value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.codec import (
    decode_ack,
    decode_context,
    decode_draft_reply,
    decode_draft_request,
    encode_ack,
    encode_context,
    encode_draft_reply,
    encode_draft_request,
)
from protos.describe_codec import (
    decode_description,
    encode_description,
)
from protos.exchange import (
    DraftResult,
    DraftStatus,
)
from protos.generation_codec import (
    decode_generation_request,
    decode_target,
    decode_token_run,
    encode_generation_request,
    encode_target,
    encode_token_run,
)
from protos.tree import chain
from tests.unit.protos.strategies import (
    LIMITS,
    acks,
    capabilities,
    generation_requests,
    loads,
    pieces,
    results,
    targets,
    token_runs,
    works,
)


def resent(message):
    """Through bytes, as the wire does it."""
    return type(message).FromString(message.SerializeToString())


def unique(values):
    return list({value.session_id: value for value in values}.values())


@given(st.lists(works(), max_size=3), st.floats(0, 1000))
def test_requests_come_back_as_they_were(given_works, remaining_s):
    sent = unique(given_works)
    call = decode_draft_request(resent(encode_draft_request(7, remaining_s, sent)), LIMITS)
    assert (call.step, list(call.works), call.malformed) == (7, sent, ())
    assert call.remaining_s == pytest.approx(remaining_s, abs=1e-6)


@given(st.lists(results(), max_size=3))
def test_replies_come_back_as_they_were(given_results):
    sent = unique(given_results)
    answer = decode_draft_reply(resent(encode_draft_reply(9, sent, 0.25, 0.5)), LIMITS)
    assert (answer.step, list(answer.results), answer.malformed) == (9, sent, ())
    assert (answer.queue_s, answer.draft_s) == (0.25, 0.5)


@given(pieces())
def test_pieces_come_back_as_they_were(piece):
    assert decode_context(resent(encode_context(piece)), LIMITS) == piece


@given(acks())
def test_acknowledgements_come_back_as_they_were(ack):
    assert decode_ack(resent(encode_ack(ack)), LIMITS) == ack


@given(capabilities(), loads())
def test_descriptions_come_back_as_they_were(record, load):
    assert decode_description(resent(encode_description(record, load))) == (record, load)


@given(generation_requests())
def test_generation_requests_come_back_as_they_were(request):
    assert decode_generation_request(resent(encode_generation_request(request)), LIMITS) == request


@given(token_runs())
def test_token_runs_come_back_as_they_were(run):
    assert decode_token_run(resent(encode_token_run(run)), run.request_id, LIMITS) == run


@given(targets())
def test_targets_come_back_as_they_were(target):
    assert decode_target(resent(encode_target(target))) == target


@pytest.mark.parametrize("remaining_s", [-1.0, 0.0, 1e12])
def test_remaining_time_is_clamped_to_its_field(remaining_s):
    message = encode_draft_request(1, remaining_s, [])
    assert 0 <= message.remaining_us < 2**32


def test_scores_below_float16_saturate():
    result = DraftResult(1, 1, 2, DraftStatus.OK, tree=chain([3], [-1e9]))
    answer = decode_draft_reply(encode_draft_reply(1, [result]), LIMITS)
    assert answer.results[0].tree.scores == (-65504.0,)

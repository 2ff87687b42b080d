"""Every way a message can break the contract, one by one: its session ends, nothing else does."""

import struct

import pytest

from protos import drafting_pb2 as pb
from protos import generation_pb2
from protos.codec import (
    decode_context,
    decode_draft_reply,
    decode_draft_request,
    encode_context,
    encode_draft_reply,
    encode_draft_request,
)
from protos.describe_codec import (
    check_describe_request,
    decode_description,
    encode_describe_request,
    encode_description,
)
from protos.errors import (
    InvalidRequest,
    MalformedRows,
    MalformedTree,
    ProtocolError,
    VersionMismatch,
)
from protos.exchange import (
    Capabilities,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
    SessionOpen,
)
from protos.features import DType, FeatureForm, FeatureRows
from protos.generation import GenerationRequest
from protos.generation_codec import (
    decode_generation_request,
    decode_token_run,
    encode_generation_request,
)
from protos.limits import MAX_RANKED_IDS, MAX_TEXT, Limits, drafter_limits
from protos.params import SamplingParams
from protos.tree import CandidateTree
from tests.unit.protos.strategies import (
    LIMITS,
    VOCAB,
    WIDTH,
)


def resent(message):
    """Through bytes, as the wire does it."""
    return type(message).FromString(message.SerializeToString())


# Malformed entries. Each case edits one good message.

ROWS = FeatureRows(0, 2, WIDTH, DType.BF16, bytes(2 * WIDTH * 2))
OPEN = SessionOpen("r", SamplingParams(), FeatureForm.RAW, WIDTH, DType.BF16)
WORK = DraftWork(11, 1, 4, 0, (1, 2, 3, 4), Plan(PlanKind.TREE, 3, 2, 6), OPEN, ROWS)
TREE = CandidateTree((1, 2, 3), (0, 0, 1), (-1.0, -2.0, -3.0))
RESULT = DraftResult(11, 1, 4, DraftStatus.OK, 4, 3, TREE, ((1, 2), (3,)))


def edit(**values):
    def apply(entry):
        for path, value in values.items():
            *parents, last = path.split("__")
            target = entry
            for name in parents:
                target = getattr(target, name)
            if isinstance(value, list):
                del getattr(target, last)[:]
                getattr(target, last).extend(value)
            else:
                setattr(target, last, value)

    return apply


BAD_WORKS = {
    "session 0": edit(session_id=0),
    "gap before base_len": edit(base_len=5),
    "tokens past base_len": edit(base_len=3),
    "no anchor": edit(base_len=0, tokens=[]),
    "past the context": edit(base_len=25, token_start=21),
    "start that overflows": edit(base_len=4, token_start=2**32 - 1),
    "token outside the vocabulary": edit(tokens=[1, 2, 3, VOCAB]),
    "huge token": edit(tokens=[1, 2, 3, 2**32 - 1]),
    "too many tokens": edit(tokens=[1] * 25, base_len=25),
    "plan of no kind": edit(plan__kind=0),
    "plan of an unknown kind": edit(plan__kind=9),
    "plan too deep": edit(plan__depth=7),
    "plan too wide": edit(plan__width=5),
    "plan with too many nodes": edit(plan__nodes=13),
    "tree plan without depth": edit(plan__depth=0),
    "tree plan without nodes": edit(plan__nodes=0),
    "closing with more": edit(close=True),
    "form of no kind": edit(open__form=0),
    "unknown form": edit(open__form=8),
    "open of another width": edit(open__width=WIDTH + 1),
    "width without a form": edit(open__form=1),
    "open of an unknown type": edit(open__dtype=9),
    "hot sampling": edit(open__sampling__temperature=3.0),
    "sampling that is no number": edit(open__sampling__temperature=float("nan")),
    "top_p of 0": edit(open__sampling__top_p=0.0, open__sampling__temperature=1.0),
    "no output tokens": edit(open__sampling__max_tokens=0),
    "stop id outside the vocabulary": edit(open__sampling__stop_token_ids=[VOCAB]),
    "too many stop ids": edit(open__sampling__stop_token_ids=[1] * 65),
    "overlong request id": edit(open__request_id="x" * (MAX_TEXT + 1)),
    "rows of another width": edit(rows__width=WIDTH + 1),
    "rows of no type": edit(rows__dtype=0),
    "rows of an unknown type": edit(rows__dtype=7),
    "rows of another type than opened": edit(rows__dtype=pb.D_TYPE_FP16),
    "no rows": edit(rows__count=0),
    "rows past the anchor": edit(rows__start=2),
    "rows past the context": edit(rows__start=2**32 - 1),
    "too few bytes": edit(rows__data=bytes(11)),
    "too many bytes": edit(rows__data=bytes(13)),
    "more rows than bytes": edit(rows__count=3),
    "rows too large": edit(rows__count=2000, rows__data=b""),
}


@pytest.mark.parametrize("case", BAD_WORKS)
def test_a_malformed_work_ends_its_own_session_only(case):
    good = DraftWork(12, 1, 1, 0, (5,))
    message = encode_draft_request(1, 0.1, [WORK, good])
    assert decode_draft_request(message, LIMITS).works == (WORK, good)
    BAD_WORKS[case](message.works[0])
    call = decode_draft_request(resent(message), LIMITS)
    assert call.works == (good,)
    (malformed,) = call.malformed
    assert malformed.session_id == message.works[0].session_id
    assert isinstance(malformed.error, ProtocolError)


BAD_RESULTS = {
    "session 0": (edit(session_id=0), ProtocolError),
    "status of no kind": (edit(status=0), ProtocolError),
    "unknown status": (edit(status=9), ProtocolError),
    "past the context": (edit(base_len=25), ProtocolError),
    "holds more than the context": (edit(held_tokens=25), ProtocolError),
    "holds more rows than the context": (edit(held_rows=2**31), ProtocolError),
    "token outside the vocabulary": (edit(tree__tokens=[1, 2, VOCAB]), MalformedTree),
    "parent that is itself": (edit(tree__parents=[0, 0, 3]), MalformedTree),
    "parent to come": (edit(tree__parents=[2, 0, 1]), MalformedTree),
    "parent far away": (edit(tree__parents=[0, 0, 2**32 - 1]), MalformedTree),
    "fewer parents": (edit(tree__parents=[0, 0]), MalformedTree),
    "more parents": (edit(tree__parents=[0, 0, 1, 1]), MalformedTree),
    "twins": (edit(tree__tokens=[1, 1, 3]), MalformedTree),
    "fewer scores": (edit(tree__scores=bytes(4)), MalformedTree),
    "half a score": (edit(tree__scores=bytes(5)), MalformedTree),
    "no scores": (edit(tree__scores=b""), MalformedTree),
    "score that is no number": (
        edit(tree__scores=struct.pack("<3e", 0, float("nan"), 0)),
        MalformedTree,
    ),
    "infinite score": (edit(tree__scores=struct.pack("<3e", 0, float("-inf"), 0)), MalformedTree),
    "too many nodes": (
        edit(tree__tokens=list(range(13)), tree__parents=[0] * 13, tree__scores=bytes(26)),
        MalformedTree,
    ),
    "too deep": (
        edit(tree__tokens=[1] * 7, tree__parents=list(range(7)), tree__scores=bytes(14)),
        MalformedTree,
    ),
    "draft of a session that is lost": (edit(status=pb.DRAFT_STATUS_LOST), MalformedTree),
    "overlong detail": (edit(detail="x" * (MAX_TEXT + 1)), ProtocolError),
}


@pytest.mark.parametrize("case", BAD_RESULTS)
def test_a_malformed_result_ends_its_own_session_only(case):
    good = DraftResult(12, 1, 1, DraftStatus.OK)
    message = encode_draft_reply(1, [RESULT, good])
    assert decode_draft_reply(message, LIMITS).results == (RESULT, good)
    spoil, kind = BAD_RESULTS[case]
    spoil(message.results[0])
    answer = decode_draft_reply(resent(message), LIMITS)
    assert answer.results == (good,)
    (malformed,) = answer.malformed
    assert isinstance(malformed.error, kind)


@pytest.mark.parametrize(
    "ranked",
    [[[1]] * 7, [[1] * (MAX_RANKED_IDS + 1)], [[VOCAB]]],
    ids=["too many depths", "too many ids", "outside the vocabulary"],
)
def test_malformed_ranked_ids_are_refused(ranked):
    message = encode_draft_reply(1, [RESULT])
    del message.results[0].ranked[:]
    message.results[0].ranked.extend([pb.RankedIds(ids=ids) for ids in ranked])
    assert len(decode_draft_reply(message, LIMITS).malformed) == 1


def test_a_session_is_named_once_per_message():
    request = encode_draft_request(1, 0.0, [WORK, WORK])
    reply = encode_draft_reply(1, [RESULT, RESULT])
    assert len(decode_draft_request(request, LIMITS).malformed) == 1
    assert len(decode_draft_reply(reply, LIMITS).malformed) == 1


def test_too_many_entries_refuse_the_whole_message():
    many = [DraftWork(i + 1, 1, 1, 0, (5,)) for i in range(LIMITS.max_works + 1)]
    with pytest.raises(ProtocolError):
        decode_draft_request(encode_draft_request(1, 0.0, many), LIMITS)
    replies = [DraftResult(i + 1, 1, 1, DraftStatus.OK) for i in range(LIMITS.max_works + 1)]
    with pytest.raises(ProtocolError):
        decode_draft_reply(encode_draft_reply(1, replies), LIMITS)


def test_a_drafter_without_features_takes_no_rows():
    limits = drafter_limits(Capabilities("ngram", "ngram", 1, (PlanKind.CHAIN,)))
    call = decode_draft_request(encode_draft_request(1, 0.0, [WORK]), limits)
    assert isinstance(call.malformed[0].error, MalformedRows)


@pytest.mark.parametrize(
    "spoil",
    [
        edit(session_id=0),
        edit(rows__width=4),
        edit(rows__count=0),
        edit(rows__data=b"12345"),
        edit(rows__start=23),
    ],
)
def test_a_malformed_piece_is_refused(spoil):
    message = encode_context(ContextRows(5, 1, ROWS))
    spoil(message)
    with pytest.raises(ProtocolError):
        decode_context(message, LIMITS)


def test_a_piece_without_rows_is_refused():
    with pytest.raises(MalformedRows):
        decode_context(pb.ContextPiece(session_id=5), LIMITS)


def test_one_row_may_be_larger_than_a_piece():
    width = 4000
    limits = Limits(row_widths=(width,), max_piece_bytes=4096)
    row = FeatureRows(0, 1, width, DType.BF16, bytes(2 * width))
    piece = ContextRows(5, 1, row)
    assert decode_context(encode_context(piece), limits) == piece
    two = pb.ContextPiece(session_id=5, rows=pb.FeatureRows(count=2, width=width, dtype=1))
    with pytest.raises(MalformedRows):
        decode_context(two, limits)


def test_another_version_is_refused_on_both_ends():
    message = encode_describe_request()
    check_describe_request(message)
    message.protocol_version += 1
    with pytest.raises(VersionMismatch):
        check_describe_request(message)
    record = Capabilities("k", "n", 1, (PlanKind.CHAIN,), protocol_version=2)
    with pytest.raises(VersionMismatch):
        decode_description(encode_description(record, DrafterLoad()))


@pytest.mark.parametrize(
    "spoil",
    [
        edit(plan_kinds=[0]),
        edit(plan_kinds=[1, 2, 3, 4, 5, 1]),
        edit(aux_layers=list(range(65))),
        edit(max_context=2**32 - 1),
        edit(name="x" * (MAX_TEXT + 1)),
        edit(load__busy_s=float("nan")),
        edit(projection__norm_eps=float("inf")),
        edit(projection__norms=["n"] * 65),
    ],
)
def test_a_malformed_description_is_refused(spoil):
    message = encode_description(Capabilities("k", "n", 1, (PlanKind.CHAIN,)), DrafterLoad())
    spoil(message)
    with pytest.raises(ProtocolError):
        decode_description(message)


BAD_GENERATION = {
    "prompt_ids": [edit(prompt_ids=[]), edit(prompt_ids=[VOCAB]), edit(prompt_ids=[1] * 25)],
    "output_ids": [edit(output_ids=[VOCAB])],
    "temperature": [edit(sampling__temperature=float("nan"))],
    "sampling": [edit(sampling__stop_token_ids=[VOCAB])],
    "request_id": [edit(request_id="x" * (MAX_TEXT + 1))],
    "speculation": [
        edit(speculation__mode=0),
        edit(speculation__drafters=["d"] * 65),
        edit(speculation__plan__kind=0),
    ],
    "timeout_s": [edit(timeout_s=t) for t in (0.0, -1.0, float("inf"), float("nan"))],
}


@pytest.mark.parametrize(
    ("param", "spoil"), [(p, spoil) for p, cases in BAD_GENERATION.items() for spoil in cases]
)
def test_a_bad_generation_request_names_its_field(param, spoil):
    message = encode_generation_request(GenerationRequest("r", (1, 2), SamplingParams()))
    spoil(message)
    with pytest.raises(InvalidRequest) as refused:
        decode_generation_request(message, LIMITS)
    assert refused.value.param == param


def test_speculation_is_auto_when_absent():
    message = generation_pb2.GenerateRequest(
        prompt_ids=[1], sampling=pb.Sampling(max_tokens=3, temperature=0.0)
    )
    assert decode_generation_request(message, LIMITS).speculation.mode == "auto"


@pytest.mark.parametrize("spoil", [edit(num_accepted=3), edit(ids=[VOCAB]), edit(finish_reason=9)])
def test_a_malformed_run_is_refused(spoil):
    message = generation_pb2.GenerateResponse(ids=[1, 2])
    spoil(message)
    with pytest.raises(ProtocolError):
        decode_token_run(message, "r", LIMITS)

"""Random bytes and mutated messages never crash a decoder: a value or an OutriderError."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos import drafting_pb2 as pb
from protos import generation_pb2
from protos.codec import (
    decode_ack,
    decode_context,
    decode_draft_reply,
    decode_draft_request,
    encode_context,
    encode_draft_reply,
    encode_draft_request,
)
from protos.describe_codec import (
    decode_description,
)
from protos.errors import (
    OutriderError,
)
from protos.exchange import (
    ContextRows,
)
from protos.generation_codec import (
    decode_generation_request,
    decode_target,
    decode_token_run,
)
from tests.unit.protos.strategies import (
    LIMITS,
    VOCAB,
)
from tests.unit.protos.test_malformed import RESULT, ROWS, WORK

DECODERS = {
    pb.DraftRequest: lambda m: decode_draft_request(m, LIMITS),
    pb.DraftReply: lambda m: decode_draft_reply(m, LIMITS),
    pb.ContextPiece: lambda m: decode_context(m, LIMITS),
    pb.ContextAck: lambda m: decode_ack(m, LIMITS),
    pb.DescribeResponse: decode_description,
    generation_pb2.GenerateRequest: lambda m: decode_generation_request(m, LIMITS),
    generation_pb2.GenerateResponse: lambda m: decode_token_run(m, "r", LIMITS),
    generation_pb2.DescribeTargetResponse: decode_target,
}
GOOD = {
    pb.DraftRequest: encode_draft_request(1, 0.1, [WORK]),
    pb.DraftReply: encode_draft_reply(1, [RESULT]),
    pb.ContextPiece: encode_context(ContextRows(5, 1, ROWS)),
}


def survives(kind, data):
    try:
        message = kind.FromString(data)
    except DecodeError:
        return
    try:
        DECODERS[kind](message)
    except OutriderError:
        return


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.__name__)
@given(data=st.binary(max_size=200))
def test_random_bytes_never_crash_a_decoder(kind, data):
    survives(kind, data)


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
@given(st.data())
def test_mutated_messages_never_crash_a_decoder(kind, data):
    changed = bytearray(GOOD[kind].SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    survives(kind, bytes(changed))


def test_a_decoded_tree_is_always_one_over_the_vocabulary():
    @given(st.binary(max_size=60))
    def check(data):
        try:
            message = pb.DraftReply(results=[pb.DraftResult.FromString(data)])
        except DecodeError:
            return
        for result in decode_draft_reply(message, LIMITS).results:
            assert all(0 <= token < VOCAB for token in result.tree.tokens)
            assert result.tree.num_nodes <= LIMITS.max_nodes
            assert result.tree.depth <= LIMITS.max_depth

    check()

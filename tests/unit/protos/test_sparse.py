"""A sparse q is a distribution or it is refused, and drawing from it follows its weights."""

import struct

import pytest
import torch

from protos import drafting_pb2 as pb
from protos.codec import decode_draft_reply, encode_draft_reply
from protos.errors import MalformedTree, ProtocolError
from protos.exchange import DraftResult, DraftStatus
from protos.noise import Purpose, draw, uniform
from protos.params import Acceptance, SamplingParams
from protos.parts_codec import decode_sampling, encode_sampling
from protos.sparse import MAX_Q_IDS, SparseQ, sparse_q
from protos.tree import CandidateTree, chain
from tests.unit.protos.strategies import LIMITS, VOCAB

Q = (SparseQ((4, 2), (0.75, 0.25)), SparseQ((7,), (1.0,)))


def reply(q: tuple[SparseQ, ...] = Q, tree: CandidateTree | None = None) -> pb.DraftReply:
    tree = chain((2, 7), (-1.5, -1.5)) if tree is None else tree
    result = DraftResult(11, 1, 4, DraftStatus.OK, 4, 0, tree, q=q)
    beside = DraftResult(12, 1, 4, DraftStatus.OK, 4, 0)
    return encode_draft_reply(1, [result, beside])


def weights(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def test_q_survives_the_wire():
    message = pb.DraftReply.FromString(reply().SerializeToString())
    assert decode_draft_reply(message, LIMITS).results[0].q == Q


BAD = {
    "one q too few": lambda r: r.q.pop(),
    "one q too many": lambda r: r.q.add(ids=[1], weights=weights(1.0)),
    "no ids": lambda r: r.q[0].Clear(),
    "too few weights": lambda r: setattr(r.q[0], "weights", weights(1.0)),
    "half a weight": lambda r: setattr(r.q[0], "weights", weights(1.0, 1.0)[:-1]),
    "negative weight": lambda r: setattr(r.q[0], "weights", weights(0.5, -0.5)),
    "weight of 0": lambda r: setattr(r.q[0], "weights", weights(0.5, 0.0)),
    "infinite weight": lambda r: setattr(r.q[0], "weights", weights(0.5, float("inf"))),
    "weight that is no number": lambda r: setattr(r.q[0], "weights", weights(float("nan"), 1.0)),
    "the same id twice": lambda r: r.q[0].MergeFrom(pb.SparseQ(ids=[2], weights=weights(0.1))),
    "id outside the vocabulary": lambda r: r.q[1].MergeFrom(
        pb.SparseQ(ids=[VOCAB], weights=weights(0.1))
    ),
    "too many ids": lambda r: r.q[1].CopyFrom(
        pb.SparseQ(ids=range(MAX_Q_IDS + 1), weights=weights(*[1.0] * (MAX_Q_IDS + 1)))
    ),
    "a token that its q does not hold": lambda r: r.tree.tokens.__setitem__(0, 3),
    "q of a tree": lambda r: r.tree.parents.__setitem__(1, 0),
}


@pytest.mark.parametrize("name", BAD)
def test_a_q_that_breaks_the_contract_ends_its_session_alone(name):
    message = reply()
    BAD[name](message.results[0])
    answer = decode_draft_reply(message, LIMITS)
    assert [m.session_id for m in answer.malformed] == [11]
    assert [r.session_id for r in answer.results] == [12]


def test_rounding_comes_before_drawing_and_leaves_nothing_without_weight():
    q = sparse_q((5, 6, 7), (0.9, 0.1, 1e-9))
    assert q.ids == (5, 6)
    assert q.probability(7) == 0.0
    assert q.probability(5) + q.probability(6) == 1.0
    with pytest.raises(MalformedTree):
        sparse_q((1,), (1e-9,))
    with pytest.raises(MalformedTree):
        sparse_q((1,), (float("nan"),))


def test_an_unknown_acceptance_is_refused_and_an_absent_one_is_exact():
    message = encode_sampling(SamplingParams(acceptance=Acceptance.REJECTION))
    assert decode_sampling(message, LIMITS).acceptance is Acceptance.REJECTION
    message.ClearField("acceptance")
    assert decode_sampling(message, LIMITS).acceptance is Acceptance.EXACT
    message.acceptance = 9
    with pytest.raises(ProtocolError):
        decode_sampling(message, LIMITS)


def test_an_argmax_needs_no_coin():
    asked = SamplingParams(temperature=0.0, acceptance=Acceptance.REJECTION)
    assert not asked.uses_rejection
    assert SamplingParams(acceptance=Acceptance.REJECTION).uses_rejection
    assert not SamplingParams().uses_rejection


def test_draws_follow_the_weights_and_purposes_differ():
    q = SparseQ((9, 3, 1000), (0.5, 0.375, 0.125))
    count = 4000
    drawn = torch.zeros(3)
    same = 0
    for position in range(count):
        index = draw(7, Purpose.DRAFT, position, q.ids, q.weights)
        drawn[index] += 1
        same += index == draw(7, Purpose.RESIDUAL, position, q.ids, q.weights)
    expected = torch.tensor(q.weights) * count
    chi_square = float(((drawn - expected) ** 2 / expected).sum())
    assert chi_square < 18.4  # p = 1e-4 with two degrees of freedom
    # Independent draws agree with probability sum of squares = 0.40625.
    assert abs(same / count - 0.40625) < 0.04


def test_coins_are_uniform_and_never_0_or_1():
    coins = torch.tensor([uniform(3, Purpose.COIN, p) for p in range(4000)], dtype=torch.float64)
    assert float(coins.min()) > 0.0
    assert float(coins.max()) < 1.0
    bins = torch.histc(coins, 20, 0.0, 1.0)
    assert float(((bins - 200) ** 2 / 200).sum()) < 52.4  # p = 5e-5 with 19 degrees of freedom

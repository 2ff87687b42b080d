"""Sparse q <-> protobuf, checked: sizes first, then ids, then what makes it a distribution.

Pure functions, used by `codec`. A q belongs to a chain: one per draft node, in order, and each
must carry the token that was drawn from it.
"""

import struct
from collections.abc import Sequence

from protos import drafting_pb2 as pb
from protos.errors import MalformedTree
from protos.limits import Limits, check_count, check_ids
from protos.sparse import MAX_Q_IDS, SparseQ
from protos.tree import CandidateTree


def encode_q(q: Sequence[SparseQ]) -> list[pb.SparseQ]:
    """As sent: ids, and float16 weights."""
    return [
        pb.SparseQ(ids=part.ids, weights=struct.pack(f"<{len(part.ids)}e", *part.weights))
        for part in q
    ]


def decode_q(
    messages: Sequence[pb.SparseQ], tree: CandidateTree, limits: Limits
) -> tuple[SparseQ, ...]:
    """Raises MalformedTree or another ProtocolError. None at all is well-formed."""
    if not messages:
        return ()
    check_count("positions with a q", len(messages), limits.max_depth)
    if not tree.is_chain or len(messages) != tree.num_nodes:
        raise MalformedTree(
            f"q belongs to a chain, one per node, not {len(messages)} to {tree.num_nodes} nodes"
        )
    return tuple(
        _decode_one(message, token, limits)
        for message, token in zip(messages, tree.tokens, strict=True)
    )


def _decode_one(message: pb.SparseQ, token: int, limits: Limits) -> SparseQ:
    count = len(message.ids)
    check_count("ids of a sparse q", count, MAX_Q_IDS)
    if len(message.weights) != 2 * count:
        raise MalformedTree(
            f"{count} ids need twice as many bytes of weights, not {len(message.weights)}"
        )
    ids = check_ids("ids of a sparse q", message.ids, limits)
    q = SparseQ(ids, struct.unpack(f"<{count}e", message.weights))
    if token not in q.ids:
        raise MalformedTree(f"token {token} was not drawn from its q: it carries no weight there")
    return q

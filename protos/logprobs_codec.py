"""Log probabilities of tokens: values <-> protobuf. Pure functions, used by `generation_codec`.

What breaks the contract is a ProtocolError: their author is a verifier.
"""

import math
from collections.abc import Iterable, Sequence

from protos import generation_pb2 as pb
from protos.errors import ProtocolError
from protos.generation import MAX_LOGPROBS, TokenLogprobs
from protos.limits import Limits, check_count, check_ids


def encode_logprobs(tokens: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """As sent; values are float32."""
    return [
        pb.TokenLogprobs(
            logprob=token.logprob,
            top_ids=[token_id for token_id, _ in token.top],
            top_logprobs=[logprob for _, logprob in token.top],
        )
        for token in tokens
    ]


def decode_logprobs(
    messages: Iterable[pb.TokenLogprobs], limits: Limits
) -> tuple[TokenLogprobs, ...]:
    """Raises ProtocolError. The caller has checked how many there are."""
    tokens: list[TokenLogprobs] = []
    for message in messages:
        check_count("best ids of a token", len(message.top_ids), MAX_LOGPROBS)
        if len(message.top_ids) != len(message.top_logprobs):
            raise ProtocolError("best ids and their log probabilities come in pairs")
        if any(math.isnan(value) for value in (message.logprob, *message.top_logprobs)):
            raise ProtocolError("log probabilities are numbers")
        ids = check_ids("top_ids", message.top_ids, limits)
        top = tuple(zip(ids, message.top_logprobs, strict=True))
        tokens.append(TokenLogprobs(message.logprob, top))
    return tuple(tokens)

"""Logit options: values <-> protobuf, checked like the rest of a request (law 5).

Pure functions, used by `generation_codec`. Everything is refused with InvalidRequest naming the
option: its author is a user. Absent options change nothing.
"""

from protos import generation_pb2 as pb
from protos.errors import InvalidRequest
from protos.limits import Limits
from protos.options import MAX_ALLOWED_TOKEN_IDS, MAX_BIASES, LogitOptions


def encode_options(options: LogitOptions) -> pb.LogitOptions | None:
    """Options as sent; None for those that change nothing."""
    if options.changes_nothing:
        return None
    return pb.LogitOptions(
        allowed_token_ids=options.allowed_token_ids,
        min_tokens=options.min_tokens,
        logit_bias=[pb.LogitBias(id=token, bias=bias) for token, bias in options.logit_bias],
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
    )


def decode_options(message: pb.GenerateRequest, limits: Limits) -> LogitOptions:
    """Raises InvalidRequest; counts are checked before anything is copied."""
    if not message.HasField("options"):
        return LogitOptions()
    sent = message.options
    for name, count, most in (
        ("allowed_token_ids", len(sent.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(sent.logit_bias), MAX_BIASES),
    ):
        if count > most:
            raise InvalidRequest(f"{name}: at most {most} entries, not {count}", name)
    has_repetition = sent.HasField("repetition_penalty")
    options = LogitOptions(
        allowed_token_ids=tuple(sent.allowed_token_ids),
        min_tokens=sent.min_tokens,
        logit_bias=tuple((entry.id, entry.bias) for entry in sent.logit_bias),
        repetition_penalty=sent.repetition_penalty if has_repetition else 1.0,
        frequency_penalty=sent.frequency_penalty,
        presence_penalty=sent.presence_penalty,
    )
    options.check_ids(limits.vocab_size)
    return options

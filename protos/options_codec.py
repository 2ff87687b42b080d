"""Logit options: values <-> protobuf, checked like the rest of a request (law 5).

Pure functions, used by `generation_codec`. Everything is refused with InvalidRequest naming the
option: its author is a user. Absent options change nothing.
"""

from typing import Final

from protos import generation_pb2 as pb
from protos.errors import InvalidRequest
from protos.grammar import GRAMMAR_PARAM, MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from protos.limits import Limits
from protos.options import MAX_ALLOWED_TOKEN_IDS, MAX_BIASES, LogitOptions

_KINDS: Final = {
    GrammarKind.JSON_SCHEMA: pb.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: pb.GRAMMAR_KIND_REGEX,
    GrammarKind.LARK: pb.GRAMMAR_KIND_LARK,
}
_KIND_OF: Final[dict[int, GrammarKind]] = {wire: kind for kind, wire in _KINDS.items()}


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
        grammar=None
        if options.grammar is None
        else pb.Grammar(kind=_KINDS[options.grammar.kind], text=options.grammar.text),
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
        grammar=_decode_grammar(sent.grammar) if sent.HasField("grammar") else None,
    )
    options.check_ids(limits.vocab_size)
    return options


def _decode_grammar(sent: pb.Grammar) -> Grammar:
    if sent.kind not in _KIND_OF:
        raise InvalidRequest(f"no grammar of kind {sent.kind} is known here", GRAMMAR_PARAM)
    if len(sent.text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"a grammar has at most {MAX_GRAMMAR_BYTES} bytes", GRAMMAR_PARAM)
    return Grammar(_KIND_OF[sent.kind], sent.text)

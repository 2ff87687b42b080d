"""Log probabilities as OpenAI's two endpoints show them. Pure.

Knows how tokens are written, nothing of runs. Invariant: one entry per delivered token, in order,
however the tokens were split over chunks; offsets are those of the text shown.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from protos.generation import TokenLogprobs
from protos.token_bytes import BytesOf, TokenBytes

LOWEST: Final = -9999.0
"""Said for probability 0: JSON has no infinity."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token. offset: characters of text before it. logprob: None for a prompt's first."""

    token: TokenBytes
    offset: int
    logprob: float | None = None
    top: tuple[tuple[TokenBytes, float], ...] = ()


class TokenWriter:
    """Tokens of one answer in order; it counts the characters before each.

    shows_special: special tokens are part of the text.
    """

    def __init__(self, bytes_of: BytesOf, *, shows_special: bool = False) -> None:
        self._bytes_of = bytes_of
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self, ids: Sequence[int], values: Sequence[TokenLogprobs | None]
    ) -> tuple[ShownToken, ...]:
        """The next tokens, each with its values."""
        shown: list[ShownToken] = []
        for token_id, value in zip(ids, values, strict=True):
            token = self._bytes_of(token_id)
            if value is None:
                shown.append(ShownToken(token, self._offset))
            else:
                top = tuple((self._bytes_of(i), _finite(logprob)) for i, logprob in value.top)
                shown.append(ShownToken(token, self._offset, _finite(value.logprob), top))
            if token.is_text or self._shows_special:
                self._offset += len(self._decoder.decode(token.data))
        return tuple(shown)


def logprobs_json(kind: Literal["chat", "completion"], tokens: Sequence[ShownToken]) -> Json:
    """A choice's `logprobs` for these tokens."""
    if kind == "chat":
        content = [
            _entry(token.token, token.logprob) | {"top_logprobs": [_entry(*t) for t in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [token.token.shown for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_best(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _entry(token: TokenBytes, logprob: float | None) -> Json:
    return {"token": token.shown, "logprob": logprob, "bytes": list(token.data)}


def _best(token: ShownToken) -> dict[str, float] | None:
    """The best by their text, and the token itself, as OpenAI's older endpoint has it."""
    if token.logprob is None:
        return None
    best: dict[str, float] = {}
    for other, logprob in token.top:
        best.setdefault(other.shown, logprob)
    best.setdefault(token.token.shown, token.logprob)
    return best


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

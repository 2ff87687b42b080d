"""What a caller wants done to the logits before a token is drawn: biases, masks, penalties.

Beside `SamplingParams` these decide the text; drafters are never told. Checked once, on
construction. Knows no model: the vocabulary is checked by the engine.
"""

import math
from dataclasses import dataclass
from typing import Final

from protos.errors import InvalidRequest
from protos.grammar import Grammar

MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100.0
MAX_ALLOWED_TOKEN_IDS: Final = 16_384
MAX_PENALTY: Final = 2.0
"""Of presence and frequency penalties, either way."""
MIN_REPETITION: Final = 0.01
MAX_REPETITION: Final = 100.0

_ID_END: Final = 2**31


def _require(ok: bool, param: str, expected: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} must be {expected}", param)


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """Changes to the logits of a row, in design 4's order; the defaults change nothing.

    allowed_token_ids: only these may be chosen; empty = all. min_tokens: output tokens before an
    EOS or stop id may be chosen. logit_bias: (id, bias in [-100, 100]), each id once. Penalties:
    repetition divides or multiplies (above 1: repeat less) logits of ids in prompt or output;
    frequency subtracts per occurrence and presence once, for ids in the output only. grammar: the
    form of the whole output; once it allows no id but ends, min_tokens holds none of them back.
    """

    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        allowed, biased = self.allowed_token_ids, [token for token, _ in self.logit_bias]
        count_ok = len(allowed) <= MAX_ALLOWED_TOKEN_IDS
        _require(count_ok, "allowed_token_ids", f"at most {MAX_ALLOWED_TOKEN_IDS} ids")
        ids_ok = all(0 <= token < _ID_END for token in allowed)
        _require(ids_ok, "allowed_token_ids", "token ids")
        _require(0 <= self.min_tokens < _ID_END, "min_tokens", "0 or a positive count")
        _require(len(biased) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} entries")
        ids_ok = all(0 <= token < _ID_END for token in biased) and len(set(biased)) == len(biased)
        _require(ids_ok, "logit_bias", "a bias for each of some token ids")
        bias_ok = all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias)
        _require(bias_ok, "logit_bias", f"biases between {-MAX_BIAS:g} and {MAX_BIAS:g}")
        repetition_ok = MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION
        expected = f"between {MIN_REPETITION:g} and {MAX_REPETITION:g}"
        _require(repetition_ok, "repetition_penalty", expected)
        for name in ("frequency_penalty", "presence_penalty"):
            value = float(getattr(self, name))
            ok = math.isfinite(value) and abs(value) <= MAX_PENALTY
            _require(ok, name, f"between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")

    @property
    def has_penalties(self) -> bool:
        """True when what was said before changes a logit."""
        off = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != off

    @property
    def changes_nothing(self) -> bool:
        """True for the defaults."""
        has_ids = self.allowed_token_ids or self.min_tokens or self.logit_bias
        return not has_ids and not self.has_penalties and self.grammar is None

    def check_ids(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the option that holds an id outside the vocabulary."""
        biased = tuple(token for token, _ in self.logit_bias)
        for name, ids in (("allowed_token_ids", self.allowed_token_ids), ("logit_bias", biased)):
            wrong = next((token for token in ids if token >= vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{name}: token ids are 0 to {vocab_size - 1}, not {wrong}", name
                )

    def check_ends(self, max_tokens: int, end_ids: frozenset[int], vocab_size: int) -> None:
        """Raise InvalidRequest where min_tokens could not be kept.

        end_ids: EOS and stop ids, which are masked until min_tokens are said.
        """
        if self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({max_tokens}), not {self.min_tokens}",
                "min_tokens",
            )
        allowed = self.allowed_token_ids or range(vocab_size)
        if self.min_tokens and len(allowed) <= len(end_ids) and end_ids.issuperset(allowed):
            raise InvalidRequest(
                "min_tokens masks the ids that end a text, and no other id is allowed", "min_tokens"
            )

"""Sampling values of one request. With `options` they decide the text; nothing else does.

Checked once, on construction. Knows no model: vocabulary bounds are checked by the engine.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from protos.errors import InvalidRequest

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this choose the argmax (design 4)."""

SEED_MIN: Final = -(2**63)
SEED_MAX: Final = 2**63 - 1
MAX_STOP_TOKEN_IDS: Final = 64


def _require(ok: bool, param: str, expected: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{param} must be {expected}, not {value!r}", param)


class Acceptance(StrEnum):
    """How a draft becomes text."""

    EXACT = "exact"
    """Sample, then walk: the text is a function of prefix, values and seed (laws 1 and 2)."""
    REJECTION = "rejection"
    """The papers' rule, min(1, p/q): keeps the distribution, not the text."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's choice is drawn (design 4).

    temperature 0..2 (below GREEDY_BELOW: argmax); top_k 0 = off; top_p in (0, 1]; min_p in
    [0, 1]; seed any int64; max_tokens >= 1 counts output tokens, EOS included; ignore_eos lifts
    the model's own ends, never the caller's stop_token_ids. acceptance: only ever what the caller
    asked for.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    acceptance: Acceptance = Acceptance.EXACT

    def __post_init__(self) -> None:
        t = self.temperature
        _require(0.0 <= t <= 2.0, "temperature", "between 0 and 2", t)
        _require(0 <= self.top_k < 2**31, "top_k", "0 (off) or a positive count", self.top_k)
        top_p_ok = 0.0 < self.top_p <= 1.0 or (self.top_p == 0.0 and self.greedy)
        _require(top_p_ok, "top_p", "above 0 and at most 1", self.top_p)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1", self.min_p)
        _require(SEED_MIN <= self.seed <= SEED_MAX, "seed", "a 64-bit integer", self.seed)
        _require(1 <= self.max_tokens < 2**31, "max_tokens", "at least 1", self.max_tokens)
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids",
            len(self.stop_token_ids),
        )
        ids_ok = all(0 <= i < 2**31 for i in self.stop_token_ids)
        _require(ids_ok, "stop_token_ids", "token ids", self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        """True when the choice is the argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def uses_rejection(self) -> bool:
        """True when drafts are sampled and tested against their q; an argmax needs no coin."""
        return self.acceptance is Acceptance.REJECTION and not self.greedy

"""The sizes an engine is built with: plain values, which `verifier_service.config` fills.

Invariant: every decoding request always gets its one row a step (max_running fits the budget).
"""

from dataclasses import dataclass
from typing import Final

from protos.errors import ConfigError

PREFILL_WHILE_DECODING: Final = 256
"""Rows of prompts that a decoding request waits for in a step, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """num_slots: token places of KV (scrap not counted); max_context: None = the target's own.

    max_tokens_per_step bounds the rows of one forward; max_prefill_chunk the rows one prompt may
    take of it; max_prefill_while_decoding the rows that all prompts together may take of a step in
    which others decode (None: one chunk, at most PREFILL_WHILE_DECODING). prefix_cache: pages of KV
    are found again. max_queued: requests waiting beyond those running before new ones are refused.
    max_draft_wait_s: the longest a step may be held for drafts, whatever was planned.
    """

    page_size: int = 64
    num_slots: int = 8192
    max_tokens_per_step: int = 512
    max_prefill_chunk: int = 512
    max_prefill_while_decoding: int | None = None
    prefix_cache: bool = True
    max_running: int = 16
    max_queued: int = 256
    max_context: int | None = None
    max_draft_wait_s: float = 0.5

    def __post_init__(self) -> None:
        counts = {
            "page_size": self.page_size,
            "max_prefill_chunk": self.max_prefill_chunk,
            "max_prefill_while_decoding": self.prefill_rows,
            "max_running": self.max_running,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_queued < 0:
            raise ConfigError(f"max_queued must be at least 0, not {self.max_queued}")
        if self.max_running > self.max_tokens_per_step:
            raise ConfigError(
                f"max_running ({self.max_running}) must fit max_tokens_per_step "
                f"({self.max_tokens_per_step})"
            )
        if self.num_slots < self.page_size:
            raise ConfigError(f"num_slots ({self.num_slots}) must hold a page of {self.page_size}")
        if self.max_draft_wait_s < 0.0:
            raise ConfigError(f"max_draft_wait_s must not be negative: {self.max_draft_wait_s}")

    @property
    def prefill_rows(self) -> int:
        """Rows of prompts in a step in which others decode."""
        if self.max_prefill_while_decoding is None:
            return min(self.max_prefill_chunk, PREFILL_WHILE_DECODING)
        return self.max_prefill_while_decoding

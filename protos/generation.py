"""A generation request and its answer as values, between whoever serves users and a verifier.

Ids only: text belongs to the ingress. A request may arrive with committed output (`output_ids`):
preemption, failover and replay are that one entrance (design, law 6).
"""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from protos.errors import DeadlineExceeded, InvalidRequest
from protos.exchange import Plan
from protos.options import LogitOptions
from protos.params import SamplingParams

MAX_LOGPROBS: Final = 20
"""Best ids that may be reported beside a token."""


class SpeculationMode(StrEnum):
    """Who decides about drafts for a request."""

    AUTO = "auto"
    OFF = "off"
    FIXED = "fixed"
    """The named drafters with the given plan, every round."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The per-request override. It changes the speed, never the text."""

    mode: SpeculationMode = SpeculationMode.AUTO
    drafters: tuple[str, ...] = ()
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request to a verifier. prompt_ids must not be empty.

    num_logprobs: best ids to report beside each output token, 0 for the token alone, None for no
    log probabilities. num_prompt_logprobs: the same for the prompt; a request that arrives with
    output has had them. timeout_s: seconds that it has from when it is handed over, None for any
    time; whoever holds it for a while hands on what is left (durations travel, never clock times).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    speculation: Speculation = field(default_factory=Speculation)
    options: LogitOptions = field(default_factory=LogitOptions)
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidRequest(f"{name} must be 0 to {MAX_LOGPROBS}, not {count}", name)
        if self.options.grammar is not None and self.params.ignore_eos:
            raise InvalidRequest(
                "ignore_eos: a text ends where its grammar does, by an EOS", "ignore_eos"
            )
        if self.timeout_s is not None and not 0.0 < self.timeout_s < math.inf:
            raise InvalidRequest(
                f"timeout_s must be a positive number of seconds, not {self.timeout_s}", "timeout_s"
            )

    def after(self, passed_s: float) -> "GenerationRequest":
        """The same request when it was held for so long. Raises DeadlineExceeded: no time left."""
        if self.timeout_s is None:
            return self
        if passed_s >= self.timeout_s:
            raise DeadlineExceeded(f"not finished within the {self.timeout_s:g} s that it had")
        return replace(self, timeout_s=self.timeout_s - passed_s)


class FinishReason(StrEnum):
    """Why the engine ended a request. Text-level stops are the ingress's."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    DEADLINE = "deadline"
    """The time that the request had (`timeout_s`) is over."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Counts of a request so far (sums; the receiver forms means).

    num_cached: tokens of the prompt that a prefix cache held. num_rounds: steps that committed
    tokens, plain ones included; num_draft_rounds: those with at least one draft node verified;
    num_drafted: nodes verified; num_accepted: nodes accepted.
    accepted_by_depth[i]: rounds that accepted at least i + 1 draft tokens. Times in seconds.
    """

    num_prompt: int = 0
    num_output: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    accepted_by_source: tuple[tuple[str, int], ...] = ()
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log p of one token under the target's raw distribution, and the best ids, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of one request committed by one step, in order.

    finish_reason is set on the last run only. stop_token_id: the id that ended it, if one did.
    num_accepted: how many of `ids` were drafted. logprobs: one per id when asked for.
    prompt_logprobs: of the prompt's tokens from the second on, with the first run, when asked for.
    is_request_fault: beside ERROR; what `error` says is the request's own doing, so that no other
    verifier would do better (a grammar that cannot be followed).
    """

    request_id: str
    ids: tuple[int, ...]
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    counts: RunCounts | None = None
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_request_fault: bool = False


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """What a verifier serves. Equal system fingerprints produce equal bits."""

    name: str
    target_digest: str
    system_fingerprint: str
    invariant: bool
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...] = ()
    takes_grammar: bool = False

"""Replies as the OpenAPI document describes them.

Documentation that is tested: `replies` writes plain JSON, and every reply of the tests conforms to
these. Invariant: a field that a reply may hold stands here, and none besides.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

TokenIds = list[int]


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Reply):
    """What went wrong; `param` names the field of the request, `code` is stable."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(_Reply):
    """The body of every reply that is not a success."""

    error: ErrorDetail


class PromptDetails(_Reply):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(_Reply):
    """Draft tokens that were verified. Tokens of reasoning are not told apart, so not counted."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(_Reply):
    """Delivered tokens of all choices; the prompt counts once for all choices of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculativeDecoding(_Reply):
    """vLLM's per-request names; num_rounds, accepted_by_source and the times are additions."""

    num_rounds: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_tokens: int
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    accepted_by_source: dict[str, int]
    draft_wait_ms: float
    verify_ms: float


class Metrics(_Reply):
    """Times and acceptance of one call."""

    time_to_first_token_ms: float
    queue_time_ms: float
    prefill_time_ms: float
    generation_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding


class TokenLogprob(_Reply):
    """One token; `bytes` joins to the text's UTF-8."""

    token: str
    logprob: float
    bytes: TokenIds


class ChosenLogprob(TokenLogprob):
    """The chosen token, and the best at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Reply):
    """One entry per token of the choice."""

    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(_Reply):
    """Parallel lists; None stands at a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: TokenIds


class AssistantMessage(_Reply):
    """The assistant's answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


FinishReason = Literal["stop", "length"]


class _Choice(_Reply):
    index: int
    token_ids: TokenIds | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatChoice(_Choice):
    """One answer. stop_reason: the caller's stop string or token id that ended it."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(_Choice):
    """One answer. stop_reason: the caller's stop string or token id that ended it."""

    text: str
    logprobs: CompletionLogprobs | None


class _Generated(_Reply):
    id: str
    acceptance: Literal["rejection"] | None = None
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Metrics


class ChatCompletion(_Generated):
    """The reply of a chat that does not stream."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Generated):
    """The reply of a completion that does not stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class UsageSoFar(_Reply):
    """Tokens up to and with a chunk, of all choices (`continuous_usage_stats`)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatDelta(_Reply):
    """What a chunk adds; the role stands in a choice's first."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class _ChunkChoice(_Reply):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: TokenIds | None = None


class ChatChunkChoice(_ChunkChoice):
    """What one step added to one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class CompletionChunkChoice(_ChunkChoice):
    """What one step added to one answer."""

    text: str
    logprobs: CompletionLogprobs | None


class _Chunk(_Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str
    acceptance: Literal["rejection"] | None = None
    usage: Usage | UsageSoFar | None = None
    metrics: Metrics | None = None


class ChatChunk(_Chunk):
    """One event of a chat's stream; one without choices, with usage and metrics, may end it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunk(_Chunk):
    """One event of a completion's stream; one without choices, with usage, may end it."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class ModelCard(_Reply):
    """A name that requests may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Reply):
    """All names."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Reply):
    """token_strs: the vocabulary's own strings, when asked for."""

    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: list[str] | None


class Detokenized(_Reply):
    """The text of ids."""

    prompt: str


class Health(_Reply):
    """A verifier answers; drafters: the names that may be asked for."""

    status: Literal["ok"]
    drafters: list[str]


class Version(_Reply):
    """The version of the distribution."""

    version: str

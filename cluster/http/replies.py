"""OpenAI reply bodies: objects, stream chunks, usage, errors. Pure: values in, JSON out.

Invariant: a stream is chunks, then (when asked) one usage chunk with empty choices, then exactly
one `[DONE]`. No reply holds a path, a class name or a trace.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cluster.http.answers import Delta, Tally
from cluster.http.limits import BodyTooLarge
from cluster.http.logprobs import logprobs_json
from protos.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PeerUnavailable,
    Unauthenticated,
    UnknownModel,
)

Json = dict[str, object]
Kind = Literal["chat", "completion"]

DONE: Final = b"data: [DONE]\n\n"
_MAX_MESSAGE: Final = 512


def dump(value: object) -> str:
    """Compact JSON; text stays readable."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: object) -> bytes:
    """One SSE event."""
    return f"data: {dump(value)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one reply shares. acceptance: as asked; "rejection" is always said,
    because such a text is not reproducible from its seed."""

    kind: Kind
    reply_id: str
    created: int
    model: str
    fingerprint: str
    return_ids: bool = False
    include_usage: bool = False
    usage_so_far: bool = False
    has_logprobs: bool = False
    acceptance: str | None = None

    def fields(self, *, chunk: bool) -> Json:
        """The common fields."""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        said: Json = {"acceptance": self.acceptance} if self.acceptance == "rejection" else {}
        return {
            "id": self.reply_id,
            "object": f"{name}.chunk" if chunk and self.kind == "chat" else name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **said,
        }


def usage(tally: Tally) -> Json:
    """OpenAI's usage, with accepted and rejected draft tokens, and prompt tokens found in the
    prefix cache, in its own fields for them."""
    return {
        "prompt_tokens": tally.num_prompt,
        "completion_tokens": tally.num_output,
        "total_tokens": tally.num_prompt + tally.num_output,
        "prompt_tokens_details": {"cached_tokens": tally.num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": tally.num_accepted,
            "rejected_prediction_tokens": max(tally.num_drafted - tally.num_accepted, 0),
        },
    }


def metrics(tally: Tally) -> Json:
    """Timings and the speculative decoding block, in the names vLLM uses.

    Steps are rounds that drafted (num_rounds counts the plain ones too). mean_acceptance_length
    counts the bonus token; acceptance_histogram[j]: steps of which j draft tokens were accepted;
    num_spec_tokens: the most that one step had accepted, vLLM's configured most being a plan here.
    """
    drafts, decode_s = tally.num_draft_rounds, tally.total_s - tally.first_token_s
    gaps = tally.num_output - 1
    by_depth = [*tally.accepted_by_depth, 0]
    histogram = [a - b for a, b in zip([drafts, *by_depth], by_depth, strict=False)]
    return {
        "time_to_first_token_ms": tally.first_token_s * 1e3,
        "queue_time_ms": tally.queue_s * 1e3,
        "prefill_time_ms": tally.prefill_s * 1e3,
        "generation_time_ms": tally.total_s * 1e3,
        "mean_itl_ms": decode_s * 1e3 / gaps if gaps > 0 else None,
        "tokens_per_second": gaps / decode_s if gaps > 0 and decode_s > 0 else None,
        "speculative_decoding": {
            "num_rounds": tally.num_rounds,
            "num_spec_steps": drafts,
            "num_draft_tokens": tally.num_drafted,
            "num_accepted_draft_tokens": tally.num_accepted,
            "num_spec_tokens": len(histogram) - 1,
            "mean_acceptance_length": 1 + tally.num_accepted / drafts if drafts else None,
            "draft_acceptance_rate": (
                tally.num_accepted / tally.num_drafted if tally.num_drafted else None
            ),
            "acceptance_histogram": histogram,
            "accepted_by_source": tally.accepted_by_source,
            "draft_wait_ms": tally.draft_wait_s * 1e3,
            "verify_ms": tally.verify_s * 1e3,
        },
    }


def chunk(head: Head, delta: Delta, *, first: bool, so_far: tuple[int, int] = (0, 0)) -> bytes:
    """One delta of a stream. The first chat chunk carries the role.

    so_far: prompt and output tokens of the call up to and with this chunk.
    """
    choice: Json = {"index": delta.index}
    if head.kind == "chat":
        content: Json = {"role": "assistant"} if first else {}
        if delta.text or first:
            content["content"] = delta.text
        choice["delta"] = content
    else:
        choice["text"] = delta.text
    shown = logprobs_json(head.kind, delta.tokens) if head.has_logprobs else None
    choice |= {"logprobs": shown, "finish_reason": delta.finish}
    if delta.finish is not None:
        choice["stop_reason"] = delta.stop_reason
    if head.return_ids:
        choice["token_ids"] = delta.ids
    body = head.fields(chunk=True) | {"choices": [choice]}
    if head.usage_so_far:
        prompt, output = so_far
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
    elif head.include_usage:
        body["usage"] = None
    return event(body)


def usage_chunk(head: Head, tally: Tally) -> bytes:
    """The one chunk without choices that ends a stream with include_usage."""
    tail = {"choices": [], "usage": usage(tally), "metrics": metrics(tally)}
    return event(head.fields(chunk=True) | tail)


def reply(head: Head, answers: Sequence[Sequence[Delta]], tally: Tally) -> Json:
    """The whole reply of a call that does not stream: the deltas of each answer, joined."""
    choices = [_choice(head, deltas) for deltas in answers]
    tail = {"choices": choices, "usage": usage(tally), "metrics": metrics(tally)}
    return head.fields(chunk=False) | tail


def _choice(head: Head, deltas: Sequence[Delta]) -> Json:
    last, text = deltas[-1], "".join(delta.text for delta in deltas)
    choice: Json = {"index": last.index}
    if head.kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    tokens = [token for delta in deltas for token in delta.tokens]
    shown = logprobs_json(head.kind, tokens) if head.has_logprobs else None
    choice |= {"logprobs": shown, "finish_reason": last.finish, "stop_reason": last.stop_reason}
    if head.return_ids:
        choice["token_ids"] = [token_id for delta in deltas for token_id in delta.ids]
    return choice


def model_card(name: str, created: int, max_context: int) -> Json:
    """One entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": max_context,
    }


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as HTTP shows it."""

    status: int
    body: Json
    headers: dict[str, str]


def fault(error: OutriderError | None) -> Fault:
    """The status, OpenAI error body and headers for an error; None is one nobody expected."""
    headers: dict[str, str] = {}
    param: str | None = None
    code: str | None = None
    match error:
        case InvalidRequest():
            status, kind, param = 400, "invalid_request_error", error.param
            if isinstance(error, BodyTooLarge):
                status = 413
            elif isinstance(error, ContextTooLong):
                code = "context_length_exceeded"
        case UnknownModel():
            status, kind, param, code = 404, "invalid_request_error", "model", "model_not_found"
        case Unauthenticated():
            status, kind, code = 401, "authentication_error", "invalid_api_key"
            headers["WWW-Authenticate"] = "Bearer"
        case Overloaded():
            status, kind, code = 503, "overloaded_error", "overloaded"
            headers["Retry-After"] = str(max(round(error.retry_after_s), 1))
        case DeadlineExceeded():
            status, kind, code = 504, "timeout_error", "deadline_exceeded"
        case PeerUnavailable():
            status, kind, code = 503, "service_unavailable_error", "unavailable"
            headers["Retry-After"] = "1"
        case _:
            status, kind = 500, "internal_error"
    known = status != 500 and error is not None
    message = str(error)[:_MAX_MESSAGE] if known else "internal error"
    detail = {"message": message, "type": kind, "param": param, "code": code}
    return Fault(status, {"error": detail}, headers)


def http_fault(status: int, headers: Mapping[str, str]) -> Fault:
    """A fault of HTTP itself: no such path (404), wrong method (405, which says what is right)."""
    messages = {404: "no such path", 405: "this path does not take that method"}
    message = messages.get(status, "the request cannot be served")
    detail = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Fault(status, {"error": detail}, dict(headers))

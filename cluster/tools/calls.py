"""What both clients share: requests built, server-sent events read, replies and errors understood.

Pure: values in, values out; no socket, no clock. Invariant: what the server reported is kept, a
stream that ends without `[DONE]` is an error, and nothing is retried after the first token.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

from protos.errors import (
    ContextTooLong,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PeerUnavailable,
    ProtocolError,
    Unauthenticated,
    UnknownModel,
)

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"

Json = Mapping[str, Any]
Messages = Sequence[Mapping[str, str]]


class Speculation(TypedDict, total=False):
    """Override of drafting: `auto`, `off` or drafters joined by plus, and a shape."""

    mode: str
    width: int
    depth: int
    nodes: int
    block: int


class Options(TypedDict, total=False):
    """What a call may ask for beyond its prompt."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    return_token_ids: bool
    speculation: Speculation
    acceptance: Literal["exact", "rejection"]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call, ready to be sent."""

    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a call."""

    num_prompt: int = 0
    num_output: int = 0
    num_accepted: int = 0
    num_rejected: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream: text of choice `index`; the last one carries usage instead."""

    text: str = ""
    index: int = 0
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    usage: Usage | None = None
    metrics: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. metrics: the server's timings and speculative decoding counts."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    fingerprint: str
    token_ids: tuple[int, ...] = ()
    metrics: Json = field(default_factory=dict)


def chat_call(messages: str | Messages, options: Options, *, stream: bool) -> Call:
    """A chat call; a plain string is one user message."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return Call(CHAT_PATH, {"messages": turns} | _common(options, stream))


def completion_call(prompt: str | Sequence[int], options: Options, *, stream: bool) -> Call:
    """A completion call of one prompt, text or token ids."""
    given = prompt if isinstance(prompt, str) else list(prompt)
    return Call(COMPLETION_PATH, {"prompt": given} | _common(options, stream))


def _common(options: Options, stream: bool) -> dict[str, object]:
    asked: dict[str, object] = {k: v for k, v in options.items() if v is not None}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    return asked


class EventReader:
    """Server-sent events out of lines: multi-line data, comments, exactly one end."""

    def __init__(self) -> None:
        self._data: list[str] = []
        self.done = False

    def feed(self, line: str) -> Json | None:
        """Take one line without its line end; an event when one is complete.

        Raises: ProtocolError for data after the end or data that is not JSON; what `error_of`
        makes of an error event.
        """
        if line:
            if line.startswith("data:"):
                self._data.append(line.removeprefix("data:").removeprefix(" "))
            return None
        if not self._data:
            return None
        data, self._data = "\n".join(self._data), []
        if self.done:
            raise ProtocolError("the stream goes on after [DONE]")
        if data == "[DONE]":
            self.done = True
            return None
        event = _object(data)
        if "error" in event:
            raise error_of(500, event, None)
        return event

    def close(self) -> None:
        """Raise PeerUnavailable unless the end was seen."""
        if not self.done:
            raise PeerUnavailable("the stream ended without [DONE]")


def read_events(lines: Iterable[str]) -> Iterator[Json]:
    """All events of a stream. Raises: as `EventReader`."""
    reader = EventReader()
    for line in lines:
        event = reader.feed(line)
        if event is not None:
            yield event
    reader.close()


def chunk_of(event: Json) -> Chunk:
    """One event as a chunk."""
    choices = event.get("choices") or []
    usage = _usage(event["usage"]) if event.get("usage") else None
    if not choices:
        return Chunk(usage=usage, metrics=event.get("metrics") or {})
    choice = choices[0]
    text = choice.get("text")
    if text is None:
        text = (choice.get("delta") or {}).get("content") or ""
    return Chunk(
        text=text,
        index=int(choice.get("index", 0)),
        finish_reason=choice.get("finish_reason"),
        token_ids=tuple(choice.get("token_ids") or ()),
        usage=usage,
    )


def reply_of(body: Json) -> Reply:
    """A reply that was not streamed. Raises: ProtocolError."""
    try:
        choice = body["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return Reply(
            text=text,
            finish_reason=choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            usage=_usage(body["usage"]),
            fingerprint=body.get("system_fingerprint") or "",
            token_ids=tuple(choice.get("token_ids") or ()),
            metrics=body.get("metrics") or {},
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ProtocolError("the reply is no completion") from error


def _usage(value: Json) -> Usage:
    details = value.get("completion_tokens_details") or {}
    return Usage(
        num_prompt=value.get("prompt_tokens", 0),
        num_output=value.get("completion_tokens", 0),
        num_accepted=details.get("accepted_prediction_tokens", 0),
        num_rejected=details.get("rejected_prediction_tokens", 0),
    )


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ProtocolError("the server sent something that is not JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError("the server sent JSON that is no object")
    return value


def body_of(content: bytes) -> dict[str, Any]:
    """A reply's JSON object. Raises: ProtocolError."""
    return _object(content)


def error_of(status: int, body: Json, retry_after: str | None) -> OutriderError:
    """The error class for an HTTP status and an OpenAI error body."""
    detail = body.get("error")
    detail = detail if isinstance(detail, Mapping) else {}
    message = str(detail.get("message") or f"HTTP {status}")
    if detail.get("code") == "context_length_exceeded":
        return ContextTooLong(message, detail.get("param"))
    if status == 404 and detail.get("code") == "model_not_found":
        return UnknownModel(message)
    if status in (401, 403):
        return Unauthenticated(message)
    if status in (429, 503):
        wait_s = float(retry_after) if retry_after and retry_after.isdigit() else 1.0
        return Overloaded(message, wait_s)
    if 400 <= status < 500:
        return InvalidRequest(message, detail.get("param"))
    return PeerUnavailable(message)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a call that has given no token yet is tried again, and after how long."""

    most: int = 2
    first_wait_s: float = 0.25

    def wait_s(self, attempt: int, error: OutriderError) -> float | None:
        """Seconds before another try after `attempt` (from 0) failed; None: give up."""
        if attempt >= self.most or not isinstance(error, Overloaded | PeerUnavailable):
            return None
        backoff_s: float = self.first_wait_s * 2**attempt
        return max(backoff_s, error.retry_after_s) if isinstance(error, Overloaded) else backoff_s


def statistics_of(text: str) -> dict[str, float]:
    """Prometheus text as {name with labels: value}."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            found[name] = float(value)
    return found

"""OpenAI request bodies: what is accepted, what is refused by name.

Pure: bytes in, checked requests out. Does not know the tokenizer, the verifier
or HTTP. Invariant: nothing a user asked for is dropped in silence. A field is used, or it is
unknown to every such API and tolerated, or it is known and refused unless its value changes
nothing (`refused.REFUSED`).
"""

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cluster.http.limits import Limits
from cluster.http.prompts import prompts_of
from cluster.http.refused import refuse_message_extras, refuse_unsupported
from protos.errors import InvalidRequest
from protos.generation import MAX_LOGPROBS
from protos.options import MAX_ALLOWED_TOKEN_IDS, MAX_BIASES
from protos.params import MAX_STOP_TOKEN_IDS

MAX_STOPS: Final = 16
MAX_STOP_LEN: Final = 256
MAX_CHOICES: Final = 16
MAX_MESSAGES: Final = 2048
_MAX_MESSAGE: Final = 300


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Shape = Annotated[int, Field(ge=1, le=256)]
AllowedIds = Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]


class SpeculationRequest(BaseModel):
    """Per-request override of drafting: it changes the speed, never the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Annotated[str, Field(min_length=1, max_length=128)] = "auto"
    width: Shape | None = None
    depth: Shape | None = None
    nodes: Shape | None = None
    block: Shape | None = None
    shape: Literal["static"] | None = None


class StreamOptions(BaseModel):
    """OpenAI's stream_options."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class TextPart(BaseModel):
    """One text part of a chat message's content."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


def _parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(BaseModel):
    """One chat message; text only."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts), Field(max_length=1024)]

    @property
    def text(self) -> str:
        """The content as one string."""
        return "".join(part.text for part in self.content)


class _Generation(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Annotated[str, Field(max_length=256)] | None = None
    stream: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: (
        Annotated[list[StopText], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)] | None
    ) = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: AllowedIds | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    return_token_ids: bool | None = None
    speculation: SpeculationRequest | None = None
    acceptance: Literal["exact", "rejection"] | None = None

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def asked_max_tokens(self) -> int | None:
        """The user's cap on output, None when there is none."""
        return self.max_tokens


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Best ids to show beside each token, None for no log probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens, which are shown when they are echoed."""
        return self.logprobs if self.echo else None

    def prompts(self, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
        """The prompts, each text or token ids.

        Raises: InvalidRequest naming `prompt`.
        """
        return prompts_of(self.prompt, limits)


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Best ids to show beside each token, None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """A chat's prompt is never shown."""
        return None

    @property
    def echo(self) -> bool:
        """A chat's prompt is never shown."""
        return False

    @property
    def asked_max_tokens(self) -> int | None:
        """max_completion_tokens, or the older name."""
        newer = self.max_completion_tokens
        return newer if newer is not None else self.max_tokens

    def conversation(self) -> list[dict[str, str]]:
        """Messages as a chat template wants them."""
        roles = {"developer": "system"}
        return [{"role": roles.get(m.role, m.role), "content": m.text} for m in self.messages]


RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """A request out of a JSON body.

    Raises: InvalidRequest with a bounded message, naming the field where there is one.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from None
    refuse_unsupported(request.model_extra or {})
    if isinstance(request, CompletionRequest):
        if request.best_of not in (None, request.n or 1):
            raise InvalidRequest("best_of must equal n: all choices are returned", "best_of")
    elif isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        for index, message in enumerate(request.messages):
            refuse_message_extras(message.model_extra or {}, f"messages[{index}].")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return request


def _first_error(error: ValidationError) -> InvalidRequest:
    """The first fault as an InvalidRequest; inputs are not echoed."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['msg']}"[:_MAX_MESSAGE])
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    return InvalidRequest(f"{path or 'body'}: {first['msg']}"[:_MAX_MESSAGE], path or None)

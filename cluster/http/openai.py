"""OpenAI request bodies: what is accepted, what is refused by name.

Pure: bytes in, checked requests out. Does not know the tokenizer, the verifier
or HTTP. Invariant: nothing a user asked for is dropped in silence. A field is used, or it is
unknown to every such API and tolerated, or it is known and refused unless its value changes
nothing (`refused.REFUSED`).
"""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from cluster.http import fields
from cluster.http.bodies import read
from cluster.http.limits import Limits
from cluster.http.messages import Messages, check_messages, conversation_of, template_of
from cluster.http.prompts import prompts_of
from cluster.http.text import TemplateUse
from protos.errors import InvalidRequest


class SpeculationRequest(BaseModel):
    """Per-request override of drafting: it changes the speed, never the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Annotated[str, Field(min_length=1, max_length=128)] = "auto"
    width: fields.Shape | None = None
    depth: fields.Shape | None = None
    nodes: fields.Shape | None = None
    block: fields.Shape | None = None
    shape: Literal["static"] | None = None


class StreamOptions(BaseModel):
    """OpenAI's stream_options."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Generation(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: fields.ModelName | None = None
    stream: bool | None = None
    n: fields.NumChoices | None = None
    stream_options: StreamOptions | None = None
    timeout_s: fields.TimeoutS | None = None
    max_tokens: fields.MaxTokens | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    min_p: fields.MinP | None = None
    seed: fields.Seed | None = None
    stop: fields.StopTexts | None = None
    stop_token_ids: fields.StopIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    logit_bias: fields.Biases | None = None
    allowed_token_ids: fields.AllowedIds | None = None
    min_tokens: fields.MinTokens | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    repetition_penalty: fields.Repetition | None = None
    response_format: fields.ResponseFormat | None = None
    structured_outputs: fields.StructuredOutputs | None = None
    return_token_ids: bool | None = None
    speculation: SpeculationRequest | None = None
    acceptance: Literal["exact", "rejection"] | None = None

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_so_far(self) -> bool:
        """True when every chunk of a stream says the usage until then."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def shows_special(self) -> bool:
        """True when special tokens are part of the text."""
        return self.skip_special_tokens is False

    @property
    def asked_max_tokens(self) -> int | None:
        """The user's cap on output, None when there is none."""
        return self.max_tokens

    def check(self) -> None:
        """Raise InvalidRequest where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        if self.usage_so_far and not self.include_usage:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats needs include_usage: true",
                "stream_options.continuous_usage_stats",
            )


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: fields.Prompt
    logprobs: fields.NumLogprobs | None = None
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

    def check(self) -> None:
        """Raise InvalidRequest where fields contradict each other."""
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of must equal n: all choices are returned", "best_of")


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: fields.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: fields.NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

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
        return conversation_of(self.messages)

    @property
    def template(self) -> TemplateUse:
        """How the chat template is applied."""
        return template_of(
            self.add_generation_prompt, self.continue_final_message, self.add_special_tokens
        )

    def check(self) -> None:
        """Raise InvalidRequest where fields contradict each other."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        newer = self.max_completion_tokens
        if newer is not None and newer < 1:
            raise InvalidRequest(
                f"max_completion_tokens must be at least 1, not {str(newer)[:24]}",
                "max_completion_tokens",
            )
        template_of(self.add_generation_prompt, self.continue_final_message)
        check_messages(self.messages)


RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """A request out of a JSON body.

    Raises: InvalidRequest with a bounded message, naming the field where there is one.
    """
    request = read(kind, body)
    request.check()
    return request

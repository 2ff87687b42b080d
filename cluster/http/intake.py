"""Bodies become orders: parsed, tokenised, checked, one generation per answer.

Knows no HTTP and starts nothing. Invariant: what comes out can be generated as it stands; whatever
cannot was refused by name before any work was queued.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cluster.http import convert, openai, replies
from cluster.http.beside import beside
from cluster.http.limits import Limits
from cluster.http.port import Backend
from cluster.http.text import ModelText
from protos.counter import derived_seed
from protos.errors import ContextTooLong, InvalidRequest, UnknownModel
from protos.generation import GenerationRequest


@dataclass(frozen=True, slots=True)
class Order:
    """One call's work. requests: `n` per prompt, the choices of a prompt side by side."""

    kind: replies.Kind
    reply_id: str
    asked: openai.ChatRequest | openai.CompletionRequest
    requests: tuple[GenerationRequest, ...]


class Intake:
    """Reads bodies for one ingress. The first of `models` is the name in replies."""

    def __init__(
        self, backend: Backend, text: ModelText, models: Sequence[str], limits: Limits
    ) -> None:
        self._backend = backend
        self._text = text
        self._models = tuple(models)
        self._limits = limits

    async def chat(self, body: bytes) -> Order:
        """An order for /v1/chat/completions.

        Raises: InvalidRequest and its kinds, PeerUnavailable while nothing serves.
        """
        asked = openai.parse(openai.ChatRequest, body)
        self.check_model(asked.model)
        messages = asked.conversation()
        num_chars = sum(len(message["content"]) for message in messages)
        encode = partial(self._text.encode_chat, messages, asked.template)
        ids = await self._encode(encode, num_chars, "messages")
        return self._order("chat", asked, [ids], "messages")

    async def completion(self, body: bytes) -> Order:
        """An order for /v1/completions. Raises: as `chat`."""
        asked = openai.parse(openai.CompletionRequest, body)
        self.check_model(asked.model)
        prompts: list[tuple[int, ...]] = []
        for prompt in asked.prompts(self._limits):
            if isinstance(prompt, str):
                encode = partial(self._text.encode, prompt, asked.add_special_tokens is not False)
                ids = await self._encode(encode, len(prompt), "prompt")
            else:
                ids = prompt
            prompts.append(ids)
        return self._order("completion", asked, prompts, "prompt")

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel for a name that is not served."""
        if name is not None and name not in self._models:
            raise UnknownModel(f"the model {name[:64]!r} is not served here")

    async def _encode(
        self, encode: Callable[[], tuple[int, ...]], num_chars: int, param: str
    ) -> tuple[int, ...]:
        """Token ids of a prompt; hopelessly long text is refused before any work."""
        most = self._backend.served().max_context * self._text.longest_token
        if num_chars > most:
            raise ContextTooLong(f"{param} is far longer than the context", param)
        return await beside(encode, num_chars)

    def _order(
        self,
        kind: replies.Kind,
        asked: openai.ChatRequest | openai.CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        param: str,
    ) -> Order:
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        reply_id = f"{prefix}-{secrets.token_hex(12)}"
        requests = self._requests(kind, asked, prompts, param, reply_id)
        return Order(kind, reply_id, asked, tuple(requests))

    def _requests(
        self,
        kind: replies.Kind,
        asked: openai.ChatRequest | openai.CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        param: str,
        reply_id: str,
    ) -> list[GenerationRequest]:
        """`n` generations per prompt, everything checked; choices of a prompt stand together."""
        convert.check_choices(asked.n or 1, len(prompts), self._limits)
        served = self._backend.served()
        speculation = convert.speculation_of(asked.speculation, served.drafters)
        convert.check_acceptance(asked.acceptance, speculation, served.drafters_with_q)
        convert.check_ids(tuple(asked.stop_token_ids or ()), served.vocab_size, "stop_token_ids")
        options = convert.options_of(asked, self._text.defaults, served.vocab_size)
        seed = secrets.randbits(64) - 2**63
        requests: list[GenerationRequest] = []
        for ids in prompts:
            convert.check_ids(ids, min(served.vocab_size, self._text.vocab_size), param)
            room = served.max_context - len(ids)
            if not ids:
                raise InvalidRequest(f"{param} must not be empty", param)
            if room < 1:
                raise ContextTooLong(
                    f"{param} has {len(ids)} tokens; the context of {served.max_context} leaves "
                    "no room for an answer",
                    param,
                )
            params = convert.sampling_of(
                asked,
                self._text.defaults,
                room=room,
                default_max_tokens=room if kind == "chat" else 16,
                seed=seed,
            )
            convert.check_min_tokens(options, params)
            for choice in range(asked.n or 1):
                requests.append(
                    GenerationRequest(
                        request_id=f"{reply_id}-{len(requests)}",
                        prompt_ids=ids,
                        params=replace(params, seed=derived_seed(params.seed, choice)),
                        speculation=speculation,
                        options=options,
                        num_logprobs=asked.num_logprobs,
                        num_prompt_logprobs=asked.num_prompt_logprobs,
                    )
                )
        return requests

"""/tokenize and /detokenize, in vLLM's shapes: text and token ids without any generation.

Knows no HTTP. Invariant: the ids are those that a completion or a chat of the same text would
start from.
"""

from collections.abc import Callable
from functools import partial

from pydantic import BaseModel, ConfigDict

from cluster.http import fields
from cluster.http.beside import beside
from cluster.http.bodies import read
from cluster.http.convert import check_ids
from cluster.http.messages import Messages, check_messages, conversation_of, template_of
from cluster.http.text import ModelText
from protos.errors import InvalidRequest

Json = dict[str, object]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: fields.ModelName | None = None


class TokenizeCompletionRequest(_Body):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(_Body):
    """POST /tokenize with messages."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    tokens: list[fields.TokenId]


class _Either(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Tokenizing:
    """Answers both endpoints. check_model: raises UnknownModel. max_context: of what is served."""

    def __init__(
        self,
        text: ModelText,
        check_model: Callable[[str | None], None],
        max_context: Callable[[], int],
    ) -> None:
        self._text = text
        self._check_model = check_model
        self._max_context = max_context

    async def tokenize(self, body: bytes) -> Json:
        """count, max_model_len, tokens and, when asked for, token_strs.

        Raises: InvalidRequest, UnknownModel, PeerUnavailable.
        """
        given = read(_Either, body).model_extra or {}
        has_prompt = given.get("prompt") is not None
        if has_prompt and given.get("messages") is not None:
            raise InvalidRequest("give prompt or messages, not both", "prompt")
        asked: TokenizeChatRequest | TokenizeCompletionRequest
        if "messages" in given and not has_prompt:
            asked = read(TokenizeChatRequest, body)
            ids = await self._chat_ids(asked)
        else:
            asked = read(TokenizeCompletionRequest, body)
            self._check_model(asked.model)
            encode = partial(self._text.encode, asked.prompt, asked.add_special_tokens)
            ids = await beside(encode, len(asked.prompt))
        texts = None
        if asked.return_token_strs:
            texts = await beside(partial(self._entries, ids), len(ids))
        return {
            "count": len(ids),
            "max_model_len": self._max_context(),
            "tokens": list(ids),
            "token_strs": texts,
        }

    async def _chat_ids(self, asked: TokenizeChatRequest) -> tuple[int, ...]:
        self._check_model(asked.model)
        use = template_of(
            asked.add_generation_prompt, asked.continue_final_message, asked.add_special_tokens
        )
        check_messages(asked.messages)
        messages = conversation_of(asked.messages)
        num_chars = sum(len(message["content"]) for message in messages)
        return await beside(partial(self._text.encode_chat, messages, use), num_chars)

    def _entries(self, ids: tuple[int, ...]) -> list[str]:
        return [self._text.entry(token_id) for token_id in ids]

    async def detokenize(self, body: bytes) -> Json:
        """The text of ids, special tokens included.

        Raises: InvalidRequest naming an id outside the vocabulary, UnknownModel.
        """
        asked = read(DetokenizeRequest, body)
        self._check_model(asked.model)
        return {"prompt": await beside(partial(self._decode, asked.tokens), len(asked.tokens))}

    def _decode(self, ids: list[int]) -> str:
        check_ids(tuple(ids), self._text.vocab_size, "tokens")
        return self._text.decode_all(ids)

"""Text and token ids: the tokenizer, incremental detokenisation, stop strings.

The one file of `cluster` that loads a tokenizer. Knows no HTTP and no verifier. Invariants: the
joined pieces of a stream equal the text given at once, whatever the runs; half a character is
never shown; the cut is made at the first token whose text completes a stop string.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from protos.errors import ConfigError, InvalidRequest
from protos.token_bytes import BytesOf, bytes_of_entries

REPLACEMENT: Final = "\ufffd"
_MAX_HELD_TOKENS: Final = 16
"""A character has at most four tokens; beyond this the bytes are simply no text."""

_SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Decoder(Protocol):
    """Token ids to text, special tokens left out."""

    def __call__(self, ids: Sequence[int], /) -> str:
        """The text of these ids."""


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """How a chat template is applied. add_special_tokens: beside those that it writes itself."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


class ChatEncoder(Protocol):
    """A conversation to token ids."""

    def __call__(
        self, messages: list[dict[str, str]], use: TemplateUse = TemplateUse(), /
    ) -> tuple[int, ...]:
        """The ids of these messages through the model's chat template."""


class Detokenizer:
    """Text of a growing list of ids, in pieces that never end in half a character.

        ids   [ ......... | prefix: decoded again for context | read .. end: not yet shown ]

    A piece is decode(ids[prefix:]) less decode(ids[prefix:read]), so that decoders which look at
    the token before (leading spaces) give the text of the whole.
    """

    def __init__(self, decode: Decoder) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is now certain."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < _MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The text still held back, replacement characters included; once."""
        if self._read == len(self._ids):
            return ""
        return self._advance(self._decode(self._ids[self._prefix :]))

    def _advance(self, text: str) -> str:
        shown = self._decode(self._ids[self._prefix : self._read])
        del self._ids[: self._prefix]
        self._prefix, self._read = self._read - self._prefix, len(self._ids)
        return text[len(shown) :]


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to show. stop: the stop string that ended it; num_tokens: ids used of those given."""

    text: str
    num_tokens: int
    stop: str | None = None


class StopScanner:
    """Finds the first stop string to be completed, holding back text that might begin one.

    Where several end at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop it ends at, if one was completed."""
        if not self._stops:
            return text, None
        window = self._held + text
        hit = self._first(window)
        if hit is not None:
            stop, end = hit
            self._held = ""
            return window[: end if self._include_stop else end - len(stop)], stop
        keep = self._held_len(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def flush(self) -> str:
        """What was held back and turned out to be text; once."""
        held, self._held = self._held, ""
        return held

    def _first(self, window: str) -> tuple[str, int] | None:
        best: tuple[str, int] | None = None
        for stop in self._stops:
            at = window.find(stop)
            if at >= 0 and (best is None or at + len(stop) < best[1]):
                best = (stop, at + len(stop))
        return best

    def _held_len(self, window: str) -> int:
        longest = min(len(self._stops[0]) - 1, len(window))
        for length in range(longest, 0, -1):
            tail = window[len(window) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Runs of ids to pieces of text, with text-level ends. One per answer."""

    def __init__(
        self, decode: Decoder, stops: Sequence[str] = (), *, include_stop: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._scanner = StopScanner(stops, include_stop=include_stop)

    def push(self, ids: Sequence[int]) -> Piece:
        """Text of one run; after a piece with `stop` nothing may be pushed."""
        shown: list[str] = []
        for number, token_id in enumerate(ids, 1):
            text, stop = self._scanner.push(self._detokenizer.push(token_id))
            shown.append(text)
            if stop is not None:
                return Piece("".join(shown), number, stop)
        return Piece("".join(shown), len(ids))

    def finish(self) -> Piece:
        """What was held back, flushed once at the end; it may still complete a stop."""
        text, stop = self._scanner.push(self._detokenizer.flush())
        return Piece(text if stop else text + self._scanner.flush(), 0, stop)


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer as the ingress uses it.

    encode: the second argument adds special tokens. decode: without special tokens; decode_all:
    with them. longest_token: UTF-8 bytes of the longest vocabulary entry: text longer than that
    times the context cannot fit, and is refused before any work. defaults: the model's own sampling
    values. bytes_of: a single token's bytes. entry: the vocabulary's own string for an id.
    """

    encode: Callable[[str, bool], tuple[int, ...]]
    encode_chat: ChatEncoder
    decode: Decoder
    decode_all: Decoder
    entry: Callable[[int], str]
    vocab_size: int
    longest_token: int
    defaults: Mapping[str, float]
    bytes_of: BytesOf


def load_text(directory: Path) -> ModelText:
    """The tokenizer, chat template and sampling defaults of a model directory.

    Nothing is fetched and no remote code runs. Raises: ConfigError.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError("verifier.target: no tokenizer can be read there") from error
    backend = tokenizer.backend_tokenizer

    def encode(text: str, special: bool) -> tuple[int, ...]:
        return tuple(backend.encode(text, add_special_tokens=special).ids)

    def encode_chat(
        messages: list[dict[str, str]], use: TemplateUse = TemplateUse(), /
    ) -> tuple[int, ...]:
        return _encode_chat(tokenizer, messages, use)

    def decode(ids: Sequence[int], /) -> str:
        return str(backend.decode(list(ids), skip_special_tokens=True))

    def decode_all(ids: Sequence[int], /) -> str:
        return str(backend.decode(list(ids), skip_special_tokens=False))

    vocabulary = tokenizer.get_vocab()
    longest = max(len(entry.encode("utf-8", "replace")) for entry in vocabulary)
    return ModelText(
        encode=encode,
        encode_chat=encode_chat,
        decode=decode,
        decode_all=decode_all,
        entry=lambda token_id: str(backend.id_to_token(token_id) or ""),
        vocab_size=len(vocabulary),
        longest_token=longest,
        defaults=_sampling_defaults(directory),
        bytes_of=_bytes_of(tokenizer),
    )


def _bytes_of(tokenizer: Any) -> BytesOf:  # noqa: ANN401
    backend = tokenizer.backend_tokenizer
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    added = backend.get_added_tokens_decoder()
    return bytes_of_entries(
        backend.id_to_token,
        frozenset(token_id for token_id, token in added.items() if token.special),
        {token_id: token.content for token_id, token in added.items()},
        byte_level=any(step.get("type") == "ByteLevel" for step in steps),
    )


def _encode_chat(
    tokenizer: Any,  # noqa: ANN401
    messages: list[dict[str, str]],
    use: TemplateUse,
) -> tuple[int, ...]:
    """Ids of a conversation through the model's chat template.

    Raises: InvalidRequest when the model has no template, or its template refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=use.add_generation_prompt,
            continue_final_message=use.continue_final_message,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidRequest("the model's chat template refuses these messages", "messages") from (
            error
        )
    backend = tokenizer.backend_tokenizer
    return tuple(backend.encode(text, add_special_tokens=use.add_special_tokens).ids)


def _sampling_defaults(directory: Path) -> dict[str, float]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("do_sample") is False:
        return {}
    return {k: stored[k] for k in _SAMPLING_DEFAULTS if isinstance(stored.get(k), int | float)}

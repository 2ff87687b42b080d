"""The target's chat template: messages to ids, and the header it puts before a user's turn.

Knows no engine. Nothing is fetched and no code of the checkpoint runs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from transformers import AutoTokenizer

from protos.errors import CheckpointError, InvalidRequest
from verifier_service.data.conversations import Message

_MARK: Final = "\u2402outrider\u2403"


class Chat:
    """Tokenizer and template of one target."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError when the target has no chat template."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise CheckpointError(f"{directory.name} has no chat template")

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation, ready for the assistant's turn.

        Raises InvalidRequest when the template refuses the messages.
        """
        return self._encode(self._render(messages, True))

    def user_header_ids(self, opening: str = "") -> tuple[int, ...]:
        """Ids of what the template writes before a first user turn, default system text included.

        A model that continues them writes a user's turn (Magpie, arXiv 2406.08464). opening: how
        that turn begins.
        """
        text = self._render([{"role": "user", "content": _MARK}], False)
        if _MARK not in text:
            raise CheckpointError("the chat template does not render a user's text as it is")
        return self._encode(text[: text.index(_MARK)] + opening)

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

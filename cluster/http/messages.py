"""Messages of a chat: their shape, and how a chat template is asked to write them down.

Pure; knows no template. Invariant: text only, and what a message asks beyond text is refused by
name.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from cluster.http.fields import MAX_MESSAGES, MAX_PARTS, parts_of
from cluster.http.refused import refuse_message_extras
from cluster.http.text import TemplateUse
from protos.errors import InvalidRequest


class TextPart(BaseModel):
    """One text part of a chat message's content."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


_CONTENT: Final[dict[str, object]] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "maxItems": MAX_PARTS,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


class Message(BaseModel):
    """One chat message; text only."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(parts_of),
        Field(max_length=MAX_PARTS),
        WithJsonSchema(_CONTENT),
    ]

    @property
    def text(self) -> str:
        """The content as one string."""
        return "".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def template_of(
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None = None,
) -> TemplateUse:
    """How a chat template is applied; a message that is continued opens no new one.

    Raises: InvalidRequest where both are asked for.
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message excludes add_generation_prompt: true",
            "continue_final_message",
        )
    opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    return TemplateUse(opens, bool(continue_final_message), bool(add_special_tokens))


def check_messages(messages: list[Message]) -> None:
    """Raise InvalidRequest naming what a message asks beyond text."""
    for index, message in enumerate(messages):
        refuse_message_extras(message.model_extra or {}, f"messages[{index}].")


def conversation_of(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as a chat template wants them."""
    roles = {"developer": "system"}
    return [{"role": roles.get(m.role, m.role), "content": m.text} for m in messages]

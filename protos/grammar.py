"""What form a text must have: a JSON schema, a regular expression or a Lark grammar, as a value.

Part of a request's logit options: it decides the text, and drafters are never told. Checked for
size here; whether it means anything is found out where it is compiled, beside the target's own
vocabulary. Knows no tokenizer.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from protos.errors import InvalidRequest

MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Of the text, as UTF-8."""

GRAMMAR_PARAM: Final = "grammar"
"""What errors about a grammar name; whoever asked users for one says it in their words."""


class GrammarKind(StrEnum):
    """How a grammar's text is read."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The whole output must match `text`, from its first token to the end of sequence."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest("a grammar must be valid Unicode", GRAMMAR_PARAM) from error
        if not 0 < size <= MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"a grammar must have 1 to {MAX_GRAMMAR_BYTES} bytes, not {size}", GRAMMAR_PARAM
            )

"""`response_format` and `structured_outputs` become one grammar, as `protos` carries it.

Pure. Knows no tokenizer: whether a schema can be kept is found out by the verifier, whose errors
are said here in the user's words. Invariant: what is asked is kept whole or refused, naming the
field it was asked in.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from protos.errors import InvalidRequest
from protos.grammar import GRAMMAR_PARAM, Grammar, GrammarKind

FORMAT: Final = "response_format"
OUTPUTS: Final = "structured_outputs"
MAX_OPTIONS: Final = 1024
"""Of `choice`."""

_MAX_SAID: Final = 300
_ANY_OBJECT: Final = '{"type": "object"}'

Json = Mapping[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Text(_Part):
    type: Literal["text"]


class _JsonObject(_Part):
    type: Literal["json_object"]


class _NamedSchema(_Part):
    """strict: both ways the schema is kept; what cannot be kept is refused both ways."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class _JsonSchema(_Part):
    type: Literal["json_schema"]
    json_schema: _NamedSchema


class _Outputs(_Part):
    """vLLM's names; exactly one of them."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_OPTIONS)
        ]
        | None
    ) = None
    grammar: str | None = None


_FORMATS: Final = TypeAdapter[_Text | _JsonObject | _JsonSchema](
    Annotated[_Text | _JsonObject | _JsonSchema, Field(discriminator="type")]
)
_OUTPUTS: Final = TypeAdapter[_Outputs](_Outputs)


def grammar_of(response_format: Json | None, outputs: Json | None) -> Grammar | None:
    """The form that a text must have, None for any. Raises InvalidRequest naming the field."""
    with named(FORMAT):
        asked = None if response_format is None else _format_of(response_format)
    if outputs is None:
        return asked
    if asked is not None:
        raise InvalidRequest(f"{OUTPUTS} and {FORMAT} exclude each other", OUTPUTS)
    with named(OUTPUTS):
        return _outputs_of(outputs)


def field_of(outputs: Json | None) -> str:
    """The field in which a request asks for a form."""
    return FORMAT if outputs is None else OUTPUTS


@contextmanager
def named(field: str) -> Iterator[None]:
    """Within, an error about a grammar names the field that the user asked in."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != GRAMMAR_PARAM:
            raise
        raise InvalidRequest(f"{field}: {error}", field) from error


def _format_of(given: Json) -> Grammar | None:
    try:
        asked = _FORMATS.validate_python(given)
    except ValidationError as error:
        raise _first_error(error) from None
    if isinstance(asked, _Text):
        return None
    if isinstance(asked, _JsonObject):
        return Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    return Grammar(GrammarKind.JSON_SCHEMA, _text_of(asked.json_schema.json_schema))


def _outputs_of(given: Json) -> Grammar:
    try:
        asked = _OUTPUTS.validate_python(given)
    except ValidationError as error:
        raise _first_error(error) from None
    found: list[Grammar] = []
    if asked.json_ is not None:
        given_text = asked.json_ if isinstance(asked.json_, str) else _text_of(asked.json_)
        found.append(Grammar(GrammarKind.JSON_SCHEMA, given_text))
    if asked.json_object:
        found.append(Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT))
    if asked.regex is not None:
        found.append(Grammar(GrammarKind.REGEX, asked.regex))
    if asked.choice is not None:
        # A string of JSON is a string of Lark.
        options = " | ".join(json.dumps(option) for option in dict.fromkeys(asked.choice))
        found.append(Grammar(GrammarKind.LARK, f"start: {options}"))
    if asked.grammar is not None:
        found.append(Grammar(GrammarKind.LARK, asked.grammar))
    if len(found) != 1:
        raise InvalidRequest(
            "exactly one of json, json_object, regex, choice and grammar must be given",
            GRAMMAR_PARAM,
        )
    return found[0]


def _text_of(schema: Json) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _first_error(error: ValidationError) -> InvalidRequest:
    """The first fault; inputs are not echoed."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])[:100]
    return InvalidRequest(f"{path}: {first['msg']}".removeprefix(": ")[:_MAX_SAID], GRAMMAR_PARAM)

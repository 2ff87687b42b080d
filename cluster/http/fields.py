"""Types of request fields, and what the OpenAPI document says of them.

Pure. Ranges that `protos` checks are written into the schema alone, so that there is one place
that refuses. Invariant: a schema may allow more than the server, never less.
"""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from protos.generation import MAX_LOGPROBS
from protos.options import MAX_ALLOWED_TOKEN_IDS, MAX_BIASES, MAX_PENALTY, MAX_REPETITION
from protos.params import MAX_STOP_TOKEN_IDS, SEED_MAX, SEED_MIN

MAX_STOPS: Final = 16
MAX_STOP_LEN: Final = 256
MAX_CHOICES: Final = 16
MAX_MESSAGES: Final = 2048
MAX_PARTS: Final = 1024
MAX_TIMEOUT_S: Final = 86_400


def _shown(kind: str, low: float | None = None, high: float | None = None) -> WithJsonSchema:
    bounds = {"minimum": low, "maximum": high}
    return WithJsonSchema({"type": kind} | {k: v for k, v in bounds.items() if v is not None})


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


_STOP_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN}
_TOKEN_ID: Final = {"type": "integer", "minimum": 0}
_IDS: Final = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_TEXT: Final = {"type": "string", "minLength": 1}

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]
StopTexts = Annotated[
    list[StopText],
    BeforeValidator(_as_list),
    Field(max_length=MAX_STOPS),
    WithJsonSchema(
        {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]}
    ),
]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Shape = Annotated[int, Field(ge=1, le=256)]
TokenId = Annotated[int, WithJsonSchema(_TOKEN_ID)]
AllowedIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]
Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
TimeoutS = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
ModelName = Annotated[str, Field(max_length=256)]

MaxTokens = Annotated[int, _shown("integer", 1)]
MinTokens = Annotated[int, _shown("integer", 0)]
Temperature = Annotated[float, _shown("number", 0, 2)]
TopP = Annotated[float, _shown("number", 0, 1)]
TopK = Annotated[int, _shown("integer", -1)]
MinP = Annotated[float, _shown("number", 0, 1)]
Seed = Annotated[int, _shown("integer", SEED_MIN, SEED_MAX)]
Penalty = Annotated[float, _shown("number", -MAX_PENALTY, MAX_PENALTY)]
Repetition = Annotated[float, _shown("number", 0, MAX_REPETITION)]

Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
"""OpenAI's four forms; `prompts` tells them apart."""


def parts_of(value: object) -> object:
    """A message's content as parts: text alone is one part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _form(*names: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "object", "properties": {key: {} for key in names}})


ResponseFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {"type": "object"},
            },
            "required": ["type"],
        }
    ),
]
StructuredOutputs = Annotated[
    dict[str, Any], _form("json", "json_object", "regex", "choice", "grammar")
]
"""vLLM's name for the same; `structured` reads both."""

"""The OpenAPI document: every endpoint, what it takes, what it may answer.

Pure. Request schemas are those that bodies are checked with, reply schemas those that tests hold
replies against. Invariant: an endpoint that is served is described, and nothing else is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.http import schemas
from cluster.http.openai import ChatRequest, CompletionRequest
from cluster.http.tokenizing import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

Json = dict[str, Any]

_ABOUT: Final = (
    "OpenAI-compatible serving with speculative decoding. Fields that no such API knows are "
    "tolerated; known fields that are not supported are refused with 400 naming them."
)
_REF: Final = "#/components/schemas/{model}"
_KEY: Final = "apiKey"

ERRORS: Final[Mapping[int, str]] = {
    400: "A field is wrong, contradicts another, or is known and not supported; `param` names it.",
    401: "No API key, or a wrong one.",
    404: "No such model.",
    413: "The body is larger than the limit.",
    500: "An error that nobody foresaw; nothing more is said.",
    503: "Overloaded, or no verifier is there. Retry-After says when to come back.",
    504: "The answer was not finished within `timeout_s`.",
}
_BODY: Final = (400, 404, 413)
_SERVED: Final = (500, 503)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One operation. bodies: any of these; reply: None for plain text; event: one of its stream's;
    is_open: asks for no key."""

    method: str
    path: str
    summary: str
    reply: type[BaseModel] | None
    errors: Sequence[int]
    bodies: Sequence[type[BaseModel]] = ()
    event: type[BaseModel] | None = None
    is_open: bool = False


ENDPOINTS: Final = (
    Endpoint(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        schemas.ChatCompletion,
        (*_BODY, *_SERVED, 504),
        (ChatRequest,),
        event=schemas.ChatChunk,
    ),
    Endpoint(
        "post",
        "/v1/completions",
        "Continue one or several prompts.",
        schemas.TextCompletion,
        (*_BODY, *_SERVED, 504),
        (CompletionRequest,),
        event=schemas.CompletionChunk,
    ),
    Endpoint("get", "/v1/models", "The models served.", schemas.ModelList, _SERVED),
    Endpoint("get", "/v1/models/{name}", "One model.", schemas.ModelCard, (404, *_SERVED)),
    Endpoint(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation.",
        schemas.Tokens,
        (*_BODY, *_SERVED),
        (TokenizeCompletionRequest, TokenizeChatRequest),
    ),
    Endpoint(
        "post",
        "/detokenize",
        "The text of token ids, special tokens included.",
        schemas.Detokenized,
        (*_BODY, *_SERVED),
        (DetokenizeRequest,),
    ),
    Endpoint(
        "get", "/health", "Whether a verifier answers.", schemas.Health, _SERVED, is_open=True
    ),
    Endpoint("get", "/ping", "The same, for probes.", schemas.Health, _SERVED, is_open=True),
    Endpoint("get", "/version", "Outrider's version.", schemas.Version, (500,), is_open=True),
    Endpoint("get", "/metrics", "Prometheus text.", None, _SERVED, is_open=True),
)
DOCUMENT_PATH: Final = "/openapi.json"
OPEN_PATHS: Final = frozenset(e.path for e in ENDPOINTS if e.is_open) | {DOCUMENT_PATH}
"""Served without a key: probes and scrapers have none."""


def document(version: str, *, has_keys: bool) -> Json:
    """The whole document. has_keys: API keys are set, so that guarded endpoints ask for one."""
    models: list[type[BaseModel]] = [schemas.ErrorReply]
    for endpoint in ENDPOINTS:
        models += endpoint.bodies
        models += [model for model in (endpoint.reply, endpoint.event) if model is not None]
    _, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template=_REF
    )
    components: Json = {"schemas": definitions["$defs"]}
    if has_keys:
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": components,
    }


def _operation(endpoint: Endpoint, has_keys: bool) -> Json:
    is_guarded = has_keys and not endpoint.is_open
    said: Json = {"summary": endpoint.summary, "operationId": _operation_id(endpoint)}
    if "{name}" in endpoint.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        said["parameters"] = [name]
    if endpoint.bodies:
        options = [_ref(body) for body in endpoint.bodies]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        said["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    statuses = sorted((*endpoint.errors, *((401,) if is_guarded else ())))
    said["responses"] = {"200": _success(endpoint)} | {str(s): _error(s) for s in statuses}
    if is_guarded:
        said["security"] = [{_KEY: []}]
    return said


def _operation_id(endpoint: Endpoint) -> str:
    words = endpoint.path.replace("{name}", "name").strip("/").replace("/", "_")
    return f"{endpoint.method}_{words}"


def _success(endpoint: Endpoint) -> Json:
    if endpoint.reply is None:
        return {"description": "Counters.", "content": {"text/plain": {"schema": _TEXT}}}
    content: Json = {"application/json": {"schema": _ref(endpoint.reply)}}
    if endpoint.event is not None:
        data = {"anyOf": [_ref(endpoint.event), _ref(schemas.ErrorReply), {"const": "[DONE]"}]}
        # OpenAPI 3.1 has no word for the events of a stream; 3.2 will have itemSchema.
        content["text/event-stream"] = {"x-event-data": data}
    return {"description": endpoint.summary, "content": content}


_TEXT: Final = {"type": "string"}


def _error(status: int) -> Json:
    said: Json = {
        "description": ERRORS[status],
        "content": {"application/json": {"schema": _ref(schemas.ErrorReply)}},
    }
    if status == 503:
        seconds = {"schema": {"type": "integer", "minimum": 1}, "required": True}
        said["headers"] = {"Retry-After": seconds}
    if status == 401:
        said["headers"] = {"WWW-Authenticate": {"schema": _TEXT, "required": True}}
    return said


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": _REF.format(model=model.__name__)}

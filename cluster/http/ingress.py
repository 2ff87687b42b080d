"""The HTTP face: OpenAI endpoints over whatever generates tokens.

Knows neither Ray nor torch, nor how bodies are read (`intake`) and answered (`serving`).
Invariants: every error becomes a status and an OpenAI error body; a bad request is a plain 4xx
before any event.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.http import metrics, replies
from cluster.http.auth import check_key
from cluster.http.intake import Intake
from cluster.http.limits import Limits, read_body
from cluster.http.openapi import DOCUMENT_PATH, OPEN_PATHS, document
from cluster.http.port import Backend
from cluster.http.serving import Serving
from cluster.http.text import ModelText
from cluster.http.tokenizing import Tokenizing
from protos.errors import OutriderError

logger = logging.getLogger(__name__)

CLIENT_LEFT: Final = 499
"""Nobody hears this status; the log and the counters do."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """How the ingress presents itself. The first of `models` is the name in replies."""

    models: tuple[str, ...]
    keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


Handler = Callable[[Request], Awaitable[Response]]


class Front:
    """The endpoints; one per ingress process, on one event loop. document: OpenAPI's."""

    def __init__(self, backend: Backend, text: ModelText, settings: FrontSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._counters = metrics.ServedCounters(settings.models[0])
        limits, models = settings.limits, settings.models
        self._intake = Intake(backend, text, models, limits)
        self._serving = Serving(backend, text, models[0], limits, self._counters)
        self._tokenizing = Tokenizing(
            text, self._intake.check_model, lambda: backend.served().max_context
        )
        self.document = document(own_version(), has_keys=bool(settings.keys))
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """The ASGI application."""
        # Routes are bare, for the edge's sake: FastAPI would have nothing to say of them.
        app = FastAPI(title="Outrider", openapi_url=None, docs_url=None, redoc_url=None)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completion),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/health", self._health),
            ("GET", "/ping", self._health),
            ("GET", "/version", self._version),
            ("GET", "/metrics", self._metrics),
            ("GET", DOCUMENT_PATH, self._describe),
        ]
        for method, path, handler in routes:
            guarded = self._edge(handler, needs_key=path not in OPEN_PATHS)
            app.add_route(path, guarded, methods=[method])
        app.add_exception_handler(HTTPException, _http_error)
        return app

    def _edge(self, handler: Handler, *, needs_key: bool) -> Handler:
        """The server's edge: the key is checked, every error becomes a status."""

        async def guarded(request: Request) -> Response:
            try:
                if needs_key:
                    check_key(request.headers.get("authorization"), self._settings.keys)
                response = await handler(request)
            except OutriderError as error:
                response = _fault_response(replies.fault(error))
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception:
                logger.exception("request failed")
                response = _fault_response(replies.fault(None))
            self._counters.count_status(response.status_code)
            return response

        return guarded

    async def _body(self, request: Request) -> bytes:
        limit = self._settings.limits.max_body_bytes
        return await read_body(request.stream(), request.headers.get("content-length"), limit)

    async def _chat(self, request: Request) -> Response:
        order = await self._intake.chat(await self._body(request))
        return await self._serving.answer(request, order)

    async def _completion(self, request: Request) -> Response:
        order = await self._intake.completion(await self._body(request))
        return await self._serving.answer(request, order)

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse(await self._tokenizing.tokenize(await self._body(request)))

    async def _detokenize(self, request: Request) -> Response:
        return JSONResponse(await self._tokenizing.detokenize(await self._body(request)))

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": own_version()})

    async def _describe(self, request: Request) -> Response:
        return JSONResponse(self.document)

    async def _models(self, request: Request) -> Response:
        limit = self._backend.served().max_context
        cards = [replies.model_card(n, self._created, limit) for n in self._settings.models]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        self._intake.check_model(name)
        limit = self._backend.served().max_context
        return JSONResponse(replies.model_card(name, self._created, limit))

    async def _health(self, request: Request) -> Response:
        served = self._backend.served()
        return JSONResponse({"status": "ok", "drafters": served.drafters})

    def samples(self) -> list[metrics.Sample]:
        """What this process counts."""
        return list(self._counters.samples())

    async def _metrics(self, request: Request) -> Response:
        own = self.samples()
        peers = list(metrics.flatten("outrider", await self._backend.statistics()))
        return PlainTextResponse(metrics.render(own + peers))


def own_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "unknown"


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return _fault_response(replies.fault(None))
    return _fault_response(replies.http_fault(error.status_code, error.headers or {}))


def _fault_response(fault: replies.Fault) -> Response:
    return JSONResponse(fault.body, fault.status, fault.headers)

"""The HTTP face: OpenAI endpoints over whatever generates tokens.

Knows neither Ray nor torch, nor how bodies are read (`intake`) and answered (`serving`).
Invariants: every error becomes a status and an OpenAI error body; a bad request is a plain 4xx
before any event.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.http import metrics, replies
from cluster.http.auth import check_key
from cluster.http.intake import Intake
from cluster.http.limits import Limits, read_body
from cluster.http.port import Backend
from cluster.http.serving import Serving
from cluster.http.text import ModelText
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
    """The endpoints; one per ingress process, on one event loop."""

    def __init__(self, backend: Backend, text: ModelText, settings: FrontSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._counters = metrics.ServedCounters(settings.models[0])
        limits, models = settings.limits, settings.models
        self._intake = Intake(backend, text, models, limits)
        self._serving = Serving(backend, text, models[0], limits, self._counters)
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="Outrider", docs_url=None, redoc_url=None)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completion),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
        ]
        for method, path, handler in routes:
            guarded = self._edge(handler, needs_key=path.startswith("/v1"))
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


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _fault_response(replies.http_fault(status))


def _fault_response(fault: replies.Fault) -> Response:
    return JSONResponse(fault.body, fault.status, fault.headers)

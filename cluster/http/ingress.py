"""The HTTP face: OpenAI endpoints over whatever generates tokens.

Knows neither Ray nor torch: `Backend` is the port, a Serve handle or a fake stands behind it.
Invariants: a bad request is a plain 4xx before any event; a stream ends in exactly one `[DONE]`;
whatever way a call ends, its generations are closed and its places given back.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.http import convert, metrics, openai, replies
from cluster.http.answers import Answer, Echo, Tally
from cluster.http.auth import check_key
from cluster.http.call import Call, EventStream
from cluster.http.limits import Gate, Limits, read_body
from cluster.http.logprobs import TokenWriter
from cluster.http.text import ModelText, TextStream
from cluster.http.waiting import while_connected
from protos.counter import derived_seed
from protos.errors import ContextTooLong, InvalidRequest, OutriderError, UnknownModel
from protos.generation import GenerationRequest, TokenRun

logger = logging.getLogger(__name__)

_THREAD_ABOVE_CHARS: Final = 20_000
"""Longer prompts are tokenised beside the event loop."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, as the verifier describes it.

    drafters_with_q: those that `acceptance: rejection` can use.
    """

    max_context: int
    vocab_size: int
    fingerprint: str
    drafters: tuple[str, ...]
    drafters_with_q: tuple[str, ...] = ()


class Backend(Protocol):
    """Whoever turns prompt ids into runs of ids."""

    def served(self) -> Served:
        """The newest description. Raises: PeerUnavailable while there is none."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenRun, None]:
        """Runs of one request; an async generator: closing it cancels the request.

        Raises: Overloaded, PeerUnavailable, InvalidRequest.
        """

    async def statistics(self) -> Mapping[str, object]:
        """Numbers of verifiers and drafters, nested by name."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """How the ingress presents itself. The first of `models` is the name in replies."""

    models: tuple[str, ...]
    keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


Handler = Callable[[Request], Awaitable[Response]]


class Front:
    """The endpoints' logic; one per ingress process, on one event loop."""

    def __init__(self, backend: Backend, text: ModelText, settings: FrontSettings) -> None:
        self._backend = backend
        self._text = text
        self._settings = settings
        self._gate = Gate(settings.limits)
        self._counters = metrics.ServedCounters(settings.models[0])
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
                response = Response(status_code=499)
            except Exception:
                logger.exception("request failed")
                response = _fault_response(replies.fault(None))
            self._counters.count_status(response.status_code)
            return response

        return guarded

    async def _chat(self, request: Request) -> Response:
        asked = openai.parse(openai.ChatRequest, await self._body(request))
        self._check_model(asked.model)
        messages = asked.conversation()
        num_chars = sum(len(message["content"]) for message in messages)
        ids = await self._encode(lambda: self._text.encode_chat(messages), num_chars, "messages")
        return await self._answer(request, "chat", asked, [ids], "messages")

    async def _completion(self, request: Request) -> Response:
        asked = openai.parse(openai.CompletionRequest, await self._body(request))
        self._check_model(asked.model)
        prompts: list[tuple[int, ...]] = []
        for prompt in asked.prompts(self._settings.limits):
            if isinstance(prompt, str):
                encode = partial(self._text.encode, prompt)
                ids = await self._encode(encode, len(prompt), "prompt")
            else:
                ids = prompt
            prompts.append(ids)
        return await self._answer(request, "completion", asked, prompts, "prompt")

    async def _body(self, request: Request) -> bytes:
        limit = self._settings.limits.max_body_bytes
        return await read_body(request.stream(), request.headers.get("content-length"), limit)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._settings.models:
            raise UnknownModel(f"the model {name[:64]!r} is not served here")

    async def _encode(
        self, encode: Callable[[], tuple[int, ...]], num_chars: int, param: str
    ) -> tuple[int, ...]:
        """Token ids of a prompt; hopelessly long text is refused before any work."""
        most = self._backend.served().max_context * self._text.longest_token
        if num_chars > most:
            raise ContextTooLong(f"{param} is far longer than the context", param)
        if num_chars > _THREAD_ABOVE_CHARS:
            return await asyncio.to_thread(encode)
        return encode()

    def _requests(
        self,
        kind: replies.Kind,
        asked: openai.ChatRequest | openai.CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        param: str,
        reply_id: str,
    ) -> list[GenerationRequest]:
        """`n` generations per prompt, everything checked; choices of a prompt stand together."""
        convert.check_choices(asked.n or 1, len(prompts), self._settings.limits)
        served = self._backend.served()
        speculation = convert.speculation_of(asked.speculation, served.drafters)
        convert.check_acceptance(asked.acceptance, speculation, served.drafters_with_q)
        convert.check_ids(tuple(asked.stop_token_ids or ()), served.vocab_size, "stop_token_ids")
        options = convert.options_of(asked, self._text.defaults, served.vocab_size)
        seed = secrets.randbits(64) - 2**63
        requests: list[GenerationRequest] = []
        for ids in prompts:
            convert.check_ids(ids, min(served.vocab_size, self._text.vocab_size), param)
            room = served.max_context - len(ids)
            if not ids:
                raise InvalidRequest(f"{param} must not be empty", param)
            if room < 1:
                raise ContextTooLong(
                    f"{param} has {len(ids)} tokens; the context of {served.max_context} leaves "
                    "no room for an answer",
                    param,
                )
            params = convert.sampling_of(
                asked,
                self._text.defaults,
                room=room,
                default_max_tokens=room if kind == "chat" else 16,
                seed=seed,
            )
            convert.check_min_tokens(options, params)
            for choice in range(asked.n or 1):
                requests.append(
                    GenerationRequest(
                        request_id=f"{reply_id}-{len(requests)}",
                        prompt_ids=ids,
                        params=replace(params, seed=derived_seed(params.seed, choice)),
                        speculation=speculation,
                        options=options,
                        num_logprobs=asked.num_logprobs,
                        num_prompt_logprobs=asked.num_prompt_logprobs,
                    )
                )
        return requests

    async def _answer(
        self,
        request: Request,
        kind: replies.Kind,
        asked: openai.ChatRequest | openai.CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        param: str,
    ) -> Response:
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        reply_id = f"{prefix}-{secrets.token_hex(12)}"
        requests = self._requests(kind, asked, prompts, param, reply_id)
        head = replies.Head(
            kind=kind,
            reply_id=reply_id,
            created=int(time.time()),
            model=asked.model or self._settings.models[0],
            fingerprint=self._backend.served().fingerprint,
            return_ids=bool(asked.return_token_ids),
            include_usage=asked.include_usage,
            has_logprobs=asked.num_logprobs is not None,
            acceptance=asked.acceptance,
        )
        call = self._call(asked, requests)
        if not asked.stream:
            deltas = await while_connected(request, call.collect())
            return JSONResponse(replies.reply(head, deltas, call.tally()))
        # Serve cancels a stream whose client leaves; watching it as well left calls open.
        await call.start()
        return EventStream(self._events(head, call), call)

    def _call(
        self,
        asked: openai.ChatRequest | openai.CompletionRequest,
        requests: Sequence[GenerationRequest],
    ) -> Call:
        limits = self._settings.limits
        ticket = self._gate.enter(len(requests))
        answers = [
            Answer(
                index,
                # The choices of one prompt count it once.
                0 if index % (asked.n or 1) else len(request.prompt_ids),
                TextStream(
                    self._text.decode,
                    asked.stop or (),
                    include_stop=bool(asked.include_stop_str_in_output),
                ),
                TokenWriter(self._text.bytes_of) if asked.num_logprobs is not None else None,
                self._echo(request.prompt_ids) if asked.echo else None,
            )
            for index, request in enumerate(requests)
        ]
        runs = [self._backend.generate(request) for request in requests]
        self._counters.num_running = self._gate.num_running

        def ended() -> None:
            ticket.leave()
            self._counters.num_running = self._gate.num_running
            for request, answer in zip(requests, answers, strict=True):
                finish = answer.finish or "abort"
                self._counters.count_answer(answer.tally, finish)
                _log_answer(request.request_id, answer.tally, finish)

        timeout_s = min(filter(None, (asked.timeout_s, limits.timeout_s)), default=None)
        return Call(answers, runs, ended, timeout_s)

    def _echo(self, prompt_ids: tuple[int, ...]) -> Echo:
        return Echo(self._text.decode(prompt_ids), prompt_ids)

    async def _events(self, head: replies.Head, call: Call) -> AsyncGenerator[bytes, None]:
        """The stream's bytes. An error becomes one event, then the end."""
        seen: set[int] = set()
        try:
            async for delta in call.deltas():
                is_first = delta.index not in seen
                seen.add(delta.index)
                if is_first or delta.text or delta.finish or delta.tokens or head.return_ids:
                    yield replies.chunk(head, delta, first=is_first)
            if head.include_usage:
                yield replies.usage_chunk(head, call.tally())
        except OutriderError as error:
            yield replies.event(replies.fault(error).body)
        except Exception:
            logger.exception("%s: stream failed", head.reply_id)
            yield replies.event(replies.fault(None).body)
        yield replies.DONE

    async def _models(self, request: Request) -> Response:
        limit = self._backend.served().max_context
        cards = [replies.model_card(n, self._created, limit) for n in self._settings.models]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        self._check_model(name)
        limit = self._backend.served().max_context
        return JSONResponse(replies.model_card(name, self._created, limit))

    async def _health(self, request: Request) -> Response:
        served = self._backend.served()
        return JSONResponse({"status": "ok", "drafters": served.drafters})

    async def _metrics(self, request: Request) -> Response:
        own = list(self._counters.samples())
        peers = list(metrics.flatten("outrider", await self._backend.statistics()))
        return PlainTextResponse(metrics.render(own + peers))


def _log_answer(request_id: str, tally: Tally, finish: str) -> None:
    logger.info(
        "%s: %s, %d prompt and %d output tokens, %d of %d drafted accepted, %.2f s",
        request_id,
        finish,
        tally.num_prompt,
        tally.num_output,
        tally.num_accepted,
        tally.num_drafted,
        tally.total_s,
    )


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _fault_response(replies.http_fault(status))


def _fault_response(fault: replies.Fault) -> Response:
    return JSONResponse(fault.body, fault.status, fault.headers)

"""Orders become replies: generations are started, watched, and given back.

Knows no bodies of requests and no routes. Invariant: a stream ends in exactly one `[DONE]`;
whatever way a call ends, its generations are closed and its places given back.
"""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from cluster.http import metrics, replies
from cluster.http.answers import Answer, Echo, Tally
from cluster.http.call import Call, EventStream
from cluster.http.intake import Order
from cluster.http.limits import Gate, Limits
from cluster.http.logprobs import TokenWriter
from cluster.http.port import Backend
from cluster.http.structured import field_of, named
from cluster.http.text import ModelText, TextStream
from cluster.http.waiting import while_connected
from protos.errors import OutriderError

logger = logging.getLogger(__name__)

_MAX_CALLER_ID: Final = 128


class Serving:
    """Answers orders; one per ingress process. model: the name in replies to nameless orders."""

    def __init__(
        self,
        backend: Backend,
        text: ModelText,
        model: str,
        limits: Limits,
        counters: metrics.ServedCounters,
    ) -> None:
        self._backend = backend
        self._text = text
        self._model = model
        self._limits = limits
        self._counters = counters
        self._gate = Gate(limits)

    async def answer(self, request: Request, order: Order) -> Response:
        """The reply, or a stream that has begun.

        Raises: what the backend raises before the first token, Overloaded, ClientDisconnect.
        """
        with named(field_of(order.asked.structured_outputs)):
            return await self._answer(request, order)

    async def _answer(self, request: Request, order: Order) -> Response:
        asked = order.asked
        head = replies.Head(
            kind=order.kind,
            reply_id=order.reply_id,
            created=int(time.time()),
            model=asked.model or self._model,
            fingerprint=self._backend.served().fingerprint,
            return_ids=bool(asked.return_token_ids),
            include_usage=asked.include_usage,
            usage_so_far=asked.usage_so_far,
            has_logprobs=asked.num_logprobs is not None,
            acceptance=asked.acceptance,
        )
        async with AsyncExitStack() as owner:
            # The call is this function's until a stream takes it: a client may leave, or Serve
            # cancel, between the first token and the stream.
            call = self._call(order, _caller_id(request))
            owner.push_async_callback(call.aclose)
            if not asked.stream:
                deltas = await while_connected(request, call.collect())
                return JSONResponse(replies.reply(head, deltas, call.tally()))
            await while_connected(request, call.start())
            owner.pop_all()
            field = field_of(asked.structured_outputs)
            return EventStream(events(head, call, field), call)

    def _call(self, order: Order, caller_id: str) -> Call:
        asked, requests = order.asked, order.requests
        answers = self._answers(order)
        ticket = self._gate.enter(len(requests))
        times = (asked.timeout_s, self._limits.timeout_s)
        timeout_s = min(filter(None, times), default=None)
        # Told to the verifier as well, which then drops who is late from its queue and its steps.
        runs = [self._backend.generate(replace(one, timeout_s=timeout_s)) for one in requests]
        self._counters.num_running = self._gate.num_running

        def ended() -> None:
            ticket.leave()
            self._counters.num_running = self._gate.num_running
            for request, answer in zip(requests, answers, strict=True):
                finish = answer.finish or "abort"
                self._counters.count_answer(answer.tally, finish)
                _log_answer(request.request_id, caller_id, answer.tally, finish)

        return Call(answers, runs, ended, timeout_s)

    def _answers(self, order: Order) -> list[Answer]:
        asked = order.asked
        decode = self._text.decode_all if asked.shows_special else self._text.decode
        return [
            Answer(
                index,
                # The choices of one prompt count it once.
                0 if index % (asked.n or 1) else len(request.prompt_ids),
                TextStream(
                    decode, asked.stop or (), include_stop=bool(asked.include_stop_str_in_output)
                ),
                self._writer(asked.shows_special) if asked.num_logprobs is not None else None,
                Echo(decode(request.prompt_ids), request.prompt_ids) if asked.echo else None,
                shows_stop_token=bool(asked.include_stop_str_in_output),
                named_ids=asked.stop_token_ids or (),
            )
            for index, request in enumerate(order.requests)
        ]

    def _writer(self, shows_special: bool) -> TokenWriter:
        return TokenWriter(self._text.bytes_of, shows_special=shows_special)


async def events(head: replies.Head, call: Call, form_field: str) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. An error becomes one event, then the end.

    form_field: what an error about a grammar names.
    """
    seen: set[int] = set()
    num_prompt, num_output = call.tally().num_prompt, 0
    try:
        with named(form_field):
            async for delta in call.deltas():
                is_first = delta.index not in seen
                seen.add(delta.index)
                num_output += len(delta.ids)
                if is_first or delta.text or delta.finish or delta.tokens or head.return_ids:
                    so_far = (num_prompt, num_output)
                    yield replies.chunk(head, delta, first=is_first, so_far=so_far)
        if head.include_usage:
            yield replies.usage_chunk(head, call.tally())
    except OutriderError as error:
        yield replies.event(replies.fault(error).body)
    except Exception:
        logger.exception("%s: stream failed", head.reply_id)
        yield replies.event(replies.fault(None).body)
    yield replies.DONE


def _caller_id(request: Request) -> str:
    """X-Request-Id, for the log; Serve itself echoes it, and makes one up where there is none."""
    given = request.headers.get("x-request-id", "")
    return given[:_MAX_CALLER_ID] if given.isascii() and given.isprintable() else "not printable"


def _log_answer(request_id: str, caller_id: str, tally: Tally, finish: str) -> None:
    logger.info(
        "%s (%s): %s, %d prompt and %d output tokens, %d of %d drafted accepted, %.2f s",
        request_id,
        caller_id or "no X-Request-Id",
        finish,
        tally.num_prompt,
        tally.num_output,
        tally.num_accepted,
        tally.num_drafted,
        tally.total_s,
    )

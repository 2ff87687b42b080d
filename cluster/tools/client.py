"""The Python client: `OutriderClient` and `AsyncOutriderClient` over httpx.

Only sends and waits; what is sent and what comes back is understood in `calls`. Invariant: a call
is tried again only while it has given no token.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from typing import Final, Self, Unpack

import httpx

from cluster.tools import calls
from cluster.tools.calls import Chunk, Messages, Options, Reply, Retries
from protos.errors import OutriderError, PeerUnavailable

DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT: Final = httpx.Timeout(600.0, connect=5.0)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _lost(error: httpx.HTTPError) -> PeerUnavailable:
    return PeerUnavailable(f"the server cannot be reached: {type(error).__name__}")


def _refusal(response: httpx.Response) -> OutriderError:
    try:
        body = calls.body_of(response.content)
    except OutriderError:
        body = {}
    return calls.error_of(response.status_code, body, response.headers.get("retry-after"))


class OutriderClient:
    """Blocking client of one server."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout: httpx.Timeout = DEFAULT_TIMEOUT,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._retries = retries or Retries()
        self._http = httpx.Client(
            base_url=url, headers=_headers(api_key), timeout=timeout, transport=transport
        )

    def chat(self, messages: str | Messages, **options: Unpack[Options]) -> Reply:
        """A whole chat answer. Raises: OutriderError."""
        return self._whole(calls.chat_call(messages, options, stream=False))

    def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Reply:
        """A whole completion. Raises: OutriderError."""
        return self._whole(calls.completion_call(prompt, options, stream=False))

    def stream_chat(
        self, messages: str | Messages, **options: Unpack[Options]
    ) -> Generator[Chunk, None, None]:
        """A chat answer as it comes. Closing the iterator cancels it. Raises: OutriderError."""
        return self._stream(calls.chat_call(messages, options, stream=True))

    def stream(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> Generator[Chunk, None, None]:
        """A completion as it comes. Closing the iterator cancels it. Raises: OutriderError."""
        return self._stream(calls.completion_call(prompt, options, stream=True))

    def models(self) -> list[str]:
        """Names that requests may use."""
        body = calls.body_of(self._get("/v1/models").content)
        return [str(card["id"]) for card in body["data"]]

    def statistics(self) -> dict[str, float]:
        """The server's counters, by Prometheus name."""
        return calls.statistics_of(self._get("/metrics").text)

    def is_healthy(self) -> bool:
        """True when the server answers and has a verifier."""
        try:
            return self._http.get("/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _get(self, path: str) -> httpx.Response:
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise _lost(error) from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return response

    def _whole(self, call: calls.Call) -> Reply:
        for attempt in range(self._retries.most + 1):
            try:
                return self._once(call)
            except OutriderError as error:
                wait_s = self._retries.wait_s(attempt, error)
                if wait_s is None:
                    raise
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _once(self, call: calls.Call) -> Reply:
        try:
            response = self._http.post(call.path, json=call.body)
        except httpx.HTTPError as error:
            raise _lost(error) from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return calls.reply_of(calls.body_of(response.content))

    def _stream(self, call: calls.Call) -> Generator[Chunk, None, None]:
        for attempt in range(self._retries.most + 1):
            has_begun = False
            try:
                with closing(self._chunks(call)) as chunks:
                    for chunk in chunks:
                        has_begun = True
                        yield chunk
                return
            except OutriderError as error:
                wait_s = None if has_begun else self._retries.wait_s(attempt, error)
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    def _chunks(self, call: calls.Call) -> Generator[Chunk, None, None]:
        try:
            with self._http.stream("POST", call.path, json=call.body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _refusal(response)
                for event in calls.read_events(response.iter_lines()):
                    yield calls.chunk_of(event)
        except httpx.HTTPError as error:
            raise _lost(error) from error


class AsyncOutriderClient:
    """The same on an event loop."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout: httpx.Timeout = DEFAULT_TIMEOUT,
        retries: Retries | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._retries = retries or Retries()
        self._http = httpx.AsyncClient(
            base_url=url, headers=_headers(api_key), timeout=timeout, transport=transport
        )

    async def chat(self, messages: str | Messages, **options: Unpack[Options]) -> Reply:
        """A whole chat answer. Raises: OutriderError."""
        return await self._whole(calls.chat_call(messages, options, stream=False))

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Reply:
        """A whole completion. Raises: OutriderError."""
        return await self._whole(calls.completion_call(prompt, options, stream=False))

    def stream_chat(
        self, messages: str | Messages, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """A chat answer as it comes. Closing the iterator cancels it. Raises: OutriderError."""
        return self._stream(calls.chat_call(messages, options, stream=True))

    def stream(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """A completion as it comes. Closing the iterator cancels it. Raises: OutriderError."""
        return self._stream(calls.completion_call(prompt, options, stream=True))

    async def statistics(self) -> dict[str, float]:
        """The server's counters, by Prometheus name."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError as error:
            raise _lost(error) from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return calls.statistics_of(response.text)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _whole(self, call: calls.Call) -> Reply:
        for attempt in range(self._retries.most + 1):
            try:
                return await self._once(call)
            except OutriderError as error:
                wait_s = self._retries.wait_s(attempt, error)
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, call: calls.Call) -> Reply:
        try:
            response = await self._http.post(call.path, json=call.body)
        except httpx.HTTPError as error:
            raise _lost(error) from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return calls.reply_of(calls.body_of(response.content))

    async def _stream(self, call: calls.Call) -> AsyncGenerator[Chunk, None]:
        for attempt in range(self._retries.most + 1):
            has_begun = False
            try:
                async with aclosing(self._chunks(call)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
                return
            except OutriderError as error:
                wait_s = None if has_begun else self._retries.wait_s(attempt, error)
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)

    async def _chunks(self, call: calls.Call) -> AsyncGenerator[Chunk, None]:
        reader = calls.EventReader()
        try:
            async with self._http.stream("POST", call.path, json=call.body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _refusal(response)
                async for line in response.aiter_lines():
                    event = reader.feed(line)
                    if event is not None:
                        yield calls.chunk_of(event)
        except httpx.HTTPError as error:
            raise _lost(error) from error
        reader.close()

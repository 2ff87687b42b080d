"""A whole server in one process: the HTTP face over a real engine, with OpenAI's own client."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import torch

from cluster.http.ingress import Front, FrontSettings
from cluster.http.port import Served
from cluster.http.text import load_text
from protos.generation import GenerationRequest, TokenRun
from tests.fakes import FakeDrafting, Source
from verifier_service.build import grammars_of
from verifier_service.engine.loop import Engine
from verifier_service.engine.service import EngineService
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target

Ask = Callable[[openai.AsyncOpenAI], Awaitable[None]]


class EngineBackend:
    """An engine's service behind the face's port; remembers runs by request."""

    def __init__(self, service: EngineService, drafters: tuple[str, ...]) -> None:
        self._service = service
        self._drafters = drafters
        self.runs: list[TokenRun] = []

    def served(self) -> Served:
        facts = self._service.facts
        return Served(
            self._service.max_context, facts.vocab_size, facts.fingerprint, self._drafters
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenRun, None]:
        async for run in self._service.generate(request):
            self.runs.append(run)
            yield run

    async def statistics(self) -> Mapping[str, object]:
        return {}


class House:
    """One target served; `ask` runs a conversation with it."""

    def __init__(self, directory: Path, dtype: torch.dtype, sources: dict[str, Source]) -> None:
        self._target = load_target(directory, dtype)
        grammars = grammars_of(directory, self._target.facts)
        self.engine = Engine(
            self._target,
            FakeDrafting(sources),
            StaticPlanner(),
            EngineSettings(num_slots=4096),
            grammars=grammars,
        )
        self.service = EngineService(self.engine)
        self.backend = EngineBackend(self.service, tuple(sources))
        self._text = load_text(directory)

    def ask(self, talk: Ask) -> None:
        """Run `talk` with a client wired straight into the application."""
        front = Front(self.backend, self._text, FrontSettings(("tiny",)))

        async def go() -> None:
            transport = httpx.ASGITransport(app=front.app(), raise_app_exceptions=False)
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(
                    base_url="http://test/v1", api_key="none", max_retries=0, http_client=http
                ) as client,
            ):
                await talk(client)

        asyncio.run(go())


@contextmanager
def house(directory: Path, dtype: torch.dtype, sources: dict[str, Source]) -> Iterator[House]:
    """A started house, stopped in the end."""
    interval = sys.getswitchinterval()
    made = House(directory, dtype, sources)
    made.service.start()
    try:
        yield made
    finally:
        made.service.stop()
        sys.setswitchinterval(interval)

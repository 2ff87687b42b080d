"""A client may leave, and Serve may cancel, at any turn of the event loop: nothing stays behind.

The loop is turned by hand: each test leaves after 0, 1, 2, ... turns until the call is over by
itself, so that every window between two awaits is met once.
"""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import ASGIApp, Message

from cluster.http.ingress import Front, FrontSettings
from cluster.http.text import ModelText, load_text
from protos.generation import GenerationRequest, TokenRun
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, posting, runs_of

MOST_TURNS = 400


class PacedBackend(FakeBackend):
    """Three tokens, each a few turns of the loop after the one before."""

    def __init__(self) -> None:
        super().__init__(lambda request: runs_of(request, [70, 71, 72]))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenRun, None]:
        self.num_open += 1
        try:
            for run in self.script(request):
                for _ in range(3):
                    await asyncio.sleep(0)
                yield run
        finally:
            self.num_open -= 1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("text")
    byte_tokenizer(VOCAB).save_pretrained(folder)
    return load_text(folder)


class Visit:
    """One POST to the bare application, turn by turn."""

    def __init__(self, app: ASGIApp, body: dict[str, object]) -> None:
        self.sent: list[Message] = []
        self._left = asyncio.Event()
        scope, message = posting("/v1/completions", body)
        self._incoming = [message]
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """From now on the server hears that the client is gone, as often as it asks."""
        self._left.set()

    async def _receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)


async def turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def num_held(front: Front) -> float:
    """Places held, as the metrics say."""
    samples = {sample.name: sample.value for sample in front.samples()}
    return samples["vllm:num_requests_running"]


HOW = {
    "leaves": ("leave",),
    "cancelled": ("cancel",),
    "leaves, then cancelled": ("leave", "cancel"),
    "cancelled twice": ("cancel", "cancel"),
}


async def visit(text: ModelText, body: dict[str, object], turns: int, how: str) -> bool:
    """Leave after so many turns; True when the call was over before."""
    backend = PacedBackend()
    front = Front(backend, text, FrontSettings(("tiny",)))
    one = Visit(front.app(), body)
    await turn(turns)
    over = one.task.done()
    for act in HOW[how]:
        if act == "leave":
            one.leave()
        else:
            one.task.cancel()
        await turn(1)
    await asyncio.wait_for(asyncio.gather(one.task, return_exceptions=True), 20)
    await turn(8)
    assert backend.num_open == 0, f"{how} after {turns} turns: a generation stays open"
    assert num_held(front) == 0, f"{how} after {turns} turns: places stay taken"
    return over


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_at_any_turn_leaves_nothing_behind(
    text: ModelText, stream: bool, prompts: int, how: str
) -> None:
    async def go() -> None:
        body = {"prompt": ["a", "b"][:prompts], "stream": stream, "max_tokens": 5}
        for turns in range(MOST_TURNS):
            if await visit(text, body, turns, how):
                return
        raise AssertionError("the call never ended by itself")

    asyncio.run(go())

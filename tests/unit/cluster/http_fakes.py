"""A backend that plays scripted runs, and a front over it without Ray or a model."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
from starlette.types import Message, Scope

from cluster.http.ingress import Front, FrontSettings
from cluster.http.port import Backend, Served
from cluster.http.text import load_text
from protos.generation import FinishReason, GenerationRequest, RunCounts, TokenLogprobs, TokenRun
from tests.tiny import byte_tokenizer

VOCAB = 384
Script = Callable[[GenerationRequest], Sequence[TokenRun | Exception]]


def runs_of(
    request: GenerationRequest, ids: Sequence[int], run_len: int = 1, drafted: int = 0
) -> list[TokenRun]:
    """These ids in runs of `run_len`, ended by length, with counts as an engine gives them."""
    runs: list[TokenRun] = []
    for at in range(0, len(ids), run_len):
        part = tuple(ids[at : at + run_len])
        counts = RunCounts(
            num_prompt=len(request.prompt_ids),
            num_output=at + len(part),
            num_rounds=len(runs) + 1,
            num_draft_rounds=len(runs) + 1,
            num_drafted=(len(runs) + 1) * drafted,
        )
        finish = FinishReason.LENGTH if at + run_len >= len(ids) else None
        runs.append(TokenRun(request.request_id, part, len(part) - 1, finish, None, counts))
    return runs


def answering(ids: Sequence[int], run_len: int = 1) -> Script:
    """A script that answers any request with these ids, log probabilities where asked for."""

    def values(count: int, num_top: int) -> tuple[TokenLogprobs, ...]:
        top = tuple((token, -1.0 - token) for token in range(num_top))
        return (TokenLogprobs(-1.0, top),) * count

    def script(request: GenerationRequest) -> Sequence[TokenRun]:
        runs = runs_of(request, ids, run_len)
        if request.num_logprobs is not None:
            most = request.num_logprobs
            runs = [replace(run, logprobs=values(len(run.ids), most)) for run in runs]
        if request.num_prompt_logprobs is not None:
            shown = values(len(request.prompt_ids) - 1, request.num_prompt_logprobs)
            runs[0] = replace(runs[0], prompt_logprobs=shown)
        return runs

    return script


class FakeBackend:
    """Plays `script(request)`; remembers requests and which of them were closed."""

    def __init__(
        self,
        script: Script,
        drafters: tuple[str, ...] = ("ngram", "eagle3"),
        drafters_with_q: tuple[str, ...] = (),
    ) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.num_open = 0
        self.num_played = 0
        self._drafters = drafters
        self._drafters_with_q = drafters_with_q

    def served(self) -> Served:
        """A small model."""
        drafters, with_q = self._drafters, self._drafters_with_q
        return Served(64, VOCAB, "fake-fingerprint", drafters, with_q)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenRun, None]:
        """The scripted runs; an exception among them is raised."""
        self.requests.append(request)
        self.num_open += 1
        try:
            for run in self.script(request):
                if isinstance(run, Exception):
                    raise run
                self.num_played += 1
                yield run
        finally:
            self.num_open -= 1

    async def statistics(self) -> Mapping[str, object]:
        """Something nested."""
        return {"verifier": {"steps_total": 3, "name": "left out"}}


def posting(path: str, body: Mapping[str, object]) -> tuple[Scope, Message]:
    """A POST as the bare application meets it: its scope, and the one message of its body."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    return scope, {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}


def client_of(
    backend: Backend, directory: Path, settings: FrontSettings | None = None
) -> httpx.AsyncClient:
    """An HTTP client wired straight into the application."""
    byte_tokenizer(VOCAB).save_pretrained(directory)
    front = Front(backend, load_text(directory), settings or FrontSettings(("tiny",)))
    transport = httpx.ASGITransport(app=front.app(), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")

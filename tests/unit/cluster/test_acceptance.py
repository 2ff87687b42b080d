"""`acceptance: rejection` over HTTP: who may ask, what the verifier is told, what is said."""

import asyncio
import json
from pathlib import Path

import pytest

from cluster.fleet.backend import HandleBackend
from cluster.fleet.messages import SourceReport, VerifierReport
from cluster.fleet.router import Router
from protos.generation import GenerationRequest
from protos.params import Acceptance, SamplingParams
from tests.unit.cluster.http_fakes import FakeBackend, client_of, runs_of

REJECTION = {"acceptance": "rejection", "prompt": "x", "temperature": 0.8}


def ask(tmp_path: Path, body: dict, with_q: tuple[str, ...] = ("small",)):
    drafters = ("ngram", "small", "head")
    backend = FakeBackend(lambda r: runs_of(r, [70, 71, 72]), drafters, with_q)

    async def go():
        async with client_of(backend, tmp_path) as client:
            return await client.post("/v1/completions", json=body)

    return asyncio.run(go()), backend


def test_it_reaches_the_verifier_and_the_reply_says_so(tmp_path):
    reply, backend = ask(tmp_path, REJECTION)
    assert reply.json()["acceptance"] == "rejection"
    (request,) = backend.requests
    assert request.params.acceptance is Acceptance.REJECTION


def test_every_chunk_of_a_stream_says_so(tmp_path):
    reply, _ = ask(tmp_path, REJECTION | {"stream": True})
    lines = [line for line in reply.text.split("\n\n") if line and "[DONE]" not in line]
    assert lines
    assert all(
        json.loads(line.removeprefix("data: "))["acceptance"] == "rejection" for line in lines
    )


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": "x", "acceptance": "exact"}])
def test_it_is_never_the_default(tmp_path, body):
    reply, backend = ask(tmp_path, body)
    assert "acceptance" not in reply.json()
    assert backend.requests[0].params.acceptance is Acceptance.EXACT


@pytest.mark.parametrize(
    ("speculation", "status"),
    [
        ({"mode": "small"}, 200),
        ({"mode": "small", "depth": 3}, 200),
        ({"mode": "small", "block": 8}, 200),
        ({"mode": "off"}, 200),
        ({"mode": "head"}, 400),
        ({"mode": "small+ngram"}, 400),
        ({"mode": "small", "width": 2}, 400),
        ({"mode": "small", "block": 8, "nodes": 16}, 400),
    ],
)
def test_shapes_and_drafters_that_cannot_do_it_are_refused_by_name(tmp_path, speculation, status):
    reply, _ = ask(tmp_path, REJECTION | {"speculation": speculation})
    assert reply.status_code == status, reply.text
    if status == 400:
        assert reply.json()["error"]["param"] == "acceptance"


def test_without_a_drafter_that_gives_q_it_is_refused(tmp_path):
    reply, backend = ask(tmp_path, REJECTION, with_q=())
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "acceptance"
    assert backend.requests == []


def test_a_drafter_counts_when_every_verifier_could_use_it():
    def report(*with_q: str) -> VerifierReport:
        sources = tuple(SourceReport(n, 1, False, n in with_q) for n in ("small", "other"))
        return VerifierReport("r", 1, 64, 100, "f", True, sources)

    class Handle:
        def options(self, **_options):
            return self

    backend = HandleBackend(Handle(), 1.0, 1.0)
    backend._lookout.reports = (report("small", "other"), report("small"))
    assert backend.served().drafters_with_q == ("small",)


def test_the_router_leaves_such_requests_alone():
    router = Router()
    statistics = {
        "drafted_total_by_source": {"small": 1000, "ngram": 1000},
        "accepted_total_by_source": {"small": 0, "ngram": 500},
    }
    sources = (SourceReport("small", 1, False, True), SourceReport("ngram", 1, True))
    router.learn([VerifierReport("r", 1, 64, 100, "f", True, sources, statistics)])
    exact = GenerationRequest("e", (1,), SamplingParams())
    asked = GenerationRequest("r", (1,), SamplingParams(acceptance=Acceptance.REJECTION))
    assert router.route(exact).speculation.drafters == ("ngram",)
    assert router.route(asked) == asked

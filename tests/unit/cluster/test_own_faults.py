"""A request that breaks by its own doing is told so, and no other verifier is troubled with it."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.fleet.backend import HandleBackend
from cluster.fleet.messages import StreamItem
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.generation_codec import encode_token_run
from protos.generation_pb2 import FINISH_REASON_ERROR
from tests.unit.cluster.http_fakes import VOCAB, client_of
from tests.unit.cluster.test_silent_verifier import Handle, Verifier, report

WHY = "the grammar cannot be followed: too complex"


def breaking(ids: tuple[int, ...], is_request_fault: bool) -> Verifier:
    """A verifier that says these ids and then breaks."""

    async def play(request: GenerationRequest) -> AsyncIterator[StreamItem]:
        for token in ids:
            yield TokenRun(request.request_id, (token,))
        last = TokenRun(request.request_id, (), finish_reason=FinishReason.ERROR, error=WHY)
        yield replace(last, is_request_fault=is_request_fault)

    return play


async def ends(request: GenerationRequest) -> AsyncIterator[StreamItem]:
    yield TokenRun(request.request_id, (72,), finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize("is_request_fault", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ids", [(), (70, 71)], ids=["at once", "midway"])
def test_only_the_verifiers_own_faults_are_taken_elsewhere(
    tmp_path: Path, is_request_fault: bool, stream: bool, ids: tuple[int, ...]
) -> None:
    reports = [replace(report(name), vocab_size=VOCAB) for name in "ab"]
    handle = Handle([breaking(ids, is_request_fault), ends], reports)

    async def go() -> None:
        backend = HandleBackend(handle, 60.0, 1.0)
        await backend.start()
        body = {"prompt": "x", "stream": stream, "structured_outputs": {"regex": "[a-z]+"}}
        try:
            async with client_of(backend, tmp_path) as client:
                reply = await client.post("/v1/completions", json=body)
        finally:
            await backend.close()
        if not is_request_fault:
            assert reply.status_code == 200
            assert WHY not in reply.text
            assert [one.output_ids for one in handle.asked] == [(), ids]
            return
        assert len(handle.asked) == 1
        if stream and ids:
            assert reply.status_code == 200
            told, done = reply.text.strip().split("\n\n")[-2:]
            assert done == "data: [DONE]"
            error = json.loads(told.removeprefix("data: "))["error"]
        else:
            assert reply.status_code == 400
            error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "structured_outputs"
        assert WHY in error["message"]

    asyncio.run(go())


def test_a_peer_that_does_not_know_whose_fault_it_was_reads_an_error() -> None:
    run = TokenRun("r", (), finish_reason=FinishReason.ERROR, error=WHY, is_request_fault=True)
    assert encode_token_run(run).finish_reason == FINISH_REASON_ERROR

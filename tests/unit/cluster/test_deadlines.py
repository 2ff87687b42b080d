"""The time that a call may take travels to the verifier, and whoever notices its end, it is 504."""

import asyncio
import json
from pathlib import Path

import pytest

from cluster.fleet.progress import Progress
from cluster.http.ingress import FrontSettings
from cluster.http.limits import Limits
from protos.errors import DeadlineExceeded
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.params import SamplingParams
from tests.unit.cluster.http_fakes import FakeBackend, client_of, runs_of


def late(request: GenerationRequest, ids: tuple[int, ...] = ()) -> list[TokenRun]:
    """What a verifier answers that drops a request after these ids."""
    said = [TokenRun(request.request_id, (token,)) for token in ids]
    return [*said, TokenRun(request.request_id, (), finish_reason=FinishReason.DEADLINE)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [(), (70, 71)])
def test_a_request_that_the_verifier_drops_is_504_or_an_error_event(
    tmp_path: Path, stream: bool, ids: tuple[int, ...]
):
    async def go() -> None:
        backend = FakeBackend(lambda request: late(request, ids))
        async with client_of(backend, tmp_path) as client:
            body = {"prompt": "a", "stream": stream, "timeout_s": 30}
            reply = await client.post("/v1/completions", json=body)
        assert backend.num_open == 0
        if stream and ids:
            assert reply.status_code == 200
            events = reply.text.strip().split("\n\n")
            assert len(events) == len(ids) + 2
            error = json.loads(events[-2].removeprefix("data: "))["error"]
            assert events[-1] == "data: [DONE]"
        else:
            assert reply.status_code == 504
            error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        assert "30 s" in error["message"], "the time that was allowed, not what was left of it"

    asyncio.run(go())


@pytest.mark.parametrize(
    ("asked_s", "allowed_s", "told_s"),
    [(None, None, None), (5.0, None, 5.0), (None, 7.0, 7.0), (5.0, 7.0, 5.0), (9.0, 7.0, 7.0)],
)
def test_every_choice_is_told_the_shorter_of_both_times(
    tmp_path: Path, asked_s: float | None, allowed_s: float | None, told_s: float | None
):
    async def go() -> None:
        backend = FakeBackend(lambda request: runs_of(request, [70]))
        settings = FrontSettings(("tiny",), limits=Limits(timeout_s=allowed_s))
        async with client_of(backend, tmp_path, settings) as client:
            body = {"prompt": ["a", "b"], "n": 2, "seed": 1, "timeout_s": asked_s}
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200
        assert [request.timeout_s for request in backend.requests] == [told_s] * 4

    asyncio.run(go())


def test_another_verifier_is_told_what_is_left_of_the_time():
    now_s = [50.0]
    asked = GenerationRequest("r", (1, 2), SamplingParams(), timeout_s=10.0)
    progress = Progress(asked, lambda: now_s[0])
    assert progress.rest() == asked
    progress.take(TokenRun("r", (7,)))
    now_s[0] += 4.0
    left = progress.rest()
    assert (left.timeout_s, left.output_ids) == (6.0, (7,))
    now_s[0] += 6.0
    with pytest.raises(DeadlineExceeded):
        progress.rest()

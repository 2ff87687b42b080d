"""Every replica is asked on its own: one that hangs costs its own answer and no other."""

import asyncio
from collections.abc import Sequence

import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.fleet.broadcast import Answers, ask_each
from tests.unit.cluster.serve_fakes import ReplicaCall, broadcast
from tests.unit.cluster.test_silent_verifier import run

LIMIT_S = 5.0


class Handle:
    def __init__(self, calls: Sequence[ReplicaCall] | Exception | None) -> None:
        self._calls = calls

    def broadcast(self, method: str) -> DeploymentBroadcastResponse:
        assert method == "describe"
        return broadcast(self._calls)


def asked(calls: Sequence[ReplicaCall] | Exception | None) -> tuple[Answers, float]:
    """The answers, and how long they took on the loop's clock."""

    async def go() -> tuple[Answers, float]:
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        answers = await ask_each(Handle(calls), "describe", LIMIT_S)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return answers, loop.time() - before_s

    return run(go())


@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_that_hangs_costs_its_own_answer_only(where):
    calls = [ReplicaCall(answer) for answer in ("a", "b")]
    calls.insert(where, ReplicaCall(None))
    answers, took_s = asked(calls)
    assert answers == Answers(("a", "b"), is_whole=False)
    assert took_s == pytest.approx(LIMIT_S)
    # It is not left a longer and longer queue of questions.
    assert [call.is_cancelled for call in calls] == [at == where for at in range(3)]


def test_when_all_answer_nobody_is_waited_for():
    calls = [ReplicaCall(answer) for answer in ("a", "b")]
    assert asked(calls) == (Answers(("a", "b"), is_whole=True), 0.0)
    assert not any(call.is_cancelled for call in calls)


@pytest.mark.parametrize("error", [RuntimeError("dead"), asyncio.CancelledError()])
def test_one_that_fails_is_left_out_and_is_no_silence(error):
    assert asked([ReplicaCall(error), ReplicaCall("b")]) == (Answers(("b",), True), 0.0)


def test_nobody_to_ask_is_an_answer_too():
    assert asked([]) == (Answers((), True), 0.0)


def test_serves_own_silence_and_errors_come_out():
    with pytest.raises(TimeoutError):
        asked(None)
    gone = DeploymentUnavailableError.__new__(DeploymentUnavailableError)
    with pytest.raises(DeploymentUnavailableError):
        asked(gone)


def test_whoever_stops_asking_leaves_nothing_behind():
    calls = [ReplicaCall(None), ReplicaCall("b")]

    async def go() -> None:
        task = asyncio.create_task(ask_each(Handle(calls), "describe", LIMIT_S))
        await asyncio.sleep(LIMIT_S / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(go())
    assert [call.is_cancelled for call in calls] == [True, False]

"""A request that lost a verifier goes on at one that is healthy, and ends when it must."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.fleet.backend import HandleBackend, VerifierLost, VerifierSilent
from cluster.fleet.failover import MAX_FAILED, MAX_LOSSES, Losses, Suspects, Ticket
from cluster.fleet.messages import StreamItem, VerifierReport
from protos.generation import FinishReason, GenerationRequest, TokenRun
from tests.unit.cluster.serve_fakes import answering
from tests.unit.cluster.test_silent_verifier import (
    ASKED,
    SILENCE_S,
    Response,
    Verifier,
    goes_on,
    hangs_after_two,
    report,
    run,
    shuts_down,
)

LOOK_S = 100 * SILENCE_S


async def hangs(_request: GenerationRequest) -> AsyncIterator[StreamItem]:
    await asyncio.Event().wait()
    yield TokenRun("never", ())


async def fails(request: GenerationRequest) -> AsyncIterator[StreamItem]:
    last = TokenRun(request.request_id, (), finish_reason=FinishReason.ERROR, error="broken")
    yield last


async def fails_after_one(request: GenerationRequest) -> AsyncIterator[StreamItem]:
    yield TokenRun(request.request_id, (5 + len(request.output_ids),))
    async for item in fails(request):
        yield item


@dataclass
class Fleet:
    """A handle whose router knows these verifiers and would take the first one of them.

    `reports` answer a look, None for one that hangs.
    """

    verifiers: dict[str, Verifier]
    reports: dict[str, VerifierReport | None] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    knows_who: bool = True
    num_looks: int = 0

    def __post_init__(self) -> None:
        self.reports = self.reports or {name: report(name) for name in self.verifiers}

    def options(self, **_options: object) -> "Fleet":
        return self

    def remote(self, request: GenerationRequest, ticket: Ticket) -> Response:
        names = ticket.preferred(self.verifiers)
        name = next(name for name in self.verifiers if name in names)
        self.asked.append(name)
        ticket.replica_id = name if self.knows_who else None
        return Response(self.verifiers[name](request))

    def broadcast(self, _method: str) -> DeploymentBroadcastResponse:
        self.num_looks += 1
        return answering(list(self.reports.values()))


async def text_of(backend: HandleBackend) -> list[int]:
    async with aclosing(backend.generate(ASKED)) as runs:
        return [token async for one in runs for token in one.ids]


async def started(fleet: Fleet) -> HandleBackend:
    """A backend that looks again only when it must."""
    backend = HandleBackend(fleet, 1e6, LOOK_S, SILENCE_S)
    await backend.start()
    return backend


async def asked_once(fleet: Fleet) -> None:
    """One request, and what it raises."""
    backend = await started(fleet)
    try:
        await text_of(backend)
    finally:
        await backend.close()


def test_the_next_try_goes_elsewhere_at_once_and_new_requests_too():
    fleet = Fleet({"hung": hangs_after_two, "well": goes_on})

    async def go() -> tuple[list[int], list[int], float]:
        backend = await started(fleet)
        # No look is needed.
        fleet.reports["hung"] = None
        before_s = asyncio.get_running_loop().time()
        first = await text_of(backend)
        took_s = asyncio.get_running_loop().time() - before_s
        second = await text_of(backend)
        await backend.close()
        return first, second, took_s

    first, second, took_s = run(go())
    assert first == [5, 6, 7, 8]
    assert second == [5, 6]
    assert fleet.asked == ["hung", "well", "well"]
    assert took_s == pytest.approx(SILENCE_S, rel=0.2)  # of a clock that only waiting moves
    assert fleet.num_looks == 1


def test_a_verifier_that_lives_again_is_let_in_again():
    fleet = Fleet({"a": hangs_after_two, "b": goes_on})

    async def go() -> None:
        backend = await started(fleet)
        await text_of(backend)
        fleet.verifiers["a"] = goes_on
        await text_of(backend)
        await backend.statistics()  # a look: it answers
        await text_of(backend)
        await backend.close()

    run(go())
    assert fleet.asked == ["a", "b", "b", "a"]


def test_a_run_is_a_sign_of_life():
    fleet = Fleet({"a": fails, "b": fails})

    async def go() -> None:
        backend = await started(fleet)
        fleet.reports = {name: report(name, math.inf) for name in "ab"}
        with pytest.raises(VerifierLost):
            await text_of(backend)
        assert fleet.asked == ["a", "b"]
        fleet.verifiers = {"a": goes_on, "b": goes_on}
        for _ in range(2):
            await text_of(backend)
        fleet.verifiers = {"b": goes_on, "a": goes_on}
        await text_of(backend)
        await backend.close()

    run(go())
    # Both are suspects until the first one speaks.
    assert fleet.asked == ["a", "b", "a", "a", "a"]


@pytest.mark.parametrize("silent_s", [1.0, math.inf])
def test_new_requests_keep_away_from_one_that_says_it_makes_no_steps(silent_s):
    fleet = Fleet({"stuck": hangs, "well": goes_on})
    fleet.reports["stuck"] = report("stuck", silent_s)

    async def go() -> None:
        backend = await started(fleet)
        await text_of(backend)
        fleet.reports["stuck"] = report("stuck")
        fleet.verifiers["stuck"] = goes_on
        await backend.statistics()
        await text_of(backend)
        await backend.close()

    run(go())
    assert fleet.asked == ["well", "stuck"]


@pytest.mark.parametrize("bad", [hangs, shuts_down, fails_after_one])
def test_a_healthy_one_is_found_behind_many_that_are_not(bad):
    names = [f"bad {number}" for number in range(MAX_LOSSES - 1)]
    fleet = Fleet(dict.fromkeys(names, bad) | {"well": goes_on})

    async def go() -> list[int]:
        backend = await started(fleet)
        text = await text_of(backend)
        await backend.close()
        return text

    text = run(go())
    assert text == list(range(5, 5 + len(text)))
    assert fleet.asked == [*names, "well"]


@pytest.mark.parametrize(
    ("bad", "most"), [(hangs, MAX_LOSSES), (fails_after_one, MAX_LOSSES), (fails, MAX_FAILED)]
)
def test_a_request_that_finds_no_healthy_one_ends(bad, most):
    fleet = Fleet({f"bad {number}": bad for number in range(2 * MAX_LOSSES)})
    with pytest.raises(VerifierLost):
        run(asked_once(fleet))
    assert len(fleet.asked) == len(set(fleet.asked)) == most


@pytest.mark.parametrize(("bad", "knows_who"), [(hangs, True), (hangs_after_two, False)])
def test_when_all_are_lost_the_request_ends(bad, knows_who):
    fleet = Fleet({"a": bad, "b": bad}, knows_who=knows_who)

    async def go() -> None:
        backend = await started(fleet)
        fleet.reports["a"] = None
        try:
            await text_of(backend)
        finally:
            await backend.close()

    with pytest.raises(VerifierSilent):
        run(go())
    assert len(fleet.asked) == 2


def test_a_verifier_that_is_only_reported_is_not_waited_for_twice():
    fleet = Fleet({"a": hangs}, {"a": report("a"), "gone": report("gone")})
    with pytest.raises(VerifierSilent):
        run(asked_once(fleet))
    assert fleet.asked == ["a", "a"]


@pytest.mark.parametrize("has_hung_one", [False, True])
def test_a_verifier_that_came_since_is_found_by_a_look(has_hung_one):
    fleet = Fleet({"a": shuts_down, "new": goes_on}, {"a": report("a")})

    async def go() -> list[int]:
        backend = await started(fleet)
        fleet.reports = {"a": report("a"), "new": report("new")}
        if has_hung_one:
            fleet.reports = {"hung": None} | fleet.reports
        try:
            # Several at once share the look.
            return (await asyncio.gather(*(text_of(backend) for _ in range(5))))[-1]
        finally:
            await backend.close()

    assert run(go()) == [5, 6]
    assert fleet.num_looks == 2


def test_all_choices_of_a_verifier_that_hangs_go_to_the_healthy_one():
    fleet = Fleet({"hung": hangs_after_two, "well": goes_on})

    async def go() -> list[list[int]]:
        backend = await started(fleet)
        fleet.reports["hung"] = None
        try:
            return await asyncio.gather(*(text_of(backend) for _ in range(6)))
        finally:
            await backend.close()

    assert run(go()) == [[5, 6, 7, 8]] * 6
    assert fleet.asked == ["hung"] * 6 + ["well"] * 6


def test_suspects_are_forgotten_in_time():
    now_s = 0.0
    suspects = Suspects(10.0, lambda: now_s)
    suspects.add("a")
    now_s = 6.0
    suspects.add("b")
    suspects.clear(None)
    assert suspects.current() == {"a", "b"}
    now_s = 10.0
    assert suspects.current() == {"b"}
    suspects.add("b")
    now_s = 19.0
    assert suspects.current() == {"b"}
    suspects.clear("b")
    suspects.clear("never seen")
    assert suspects.current() == frozenset()


def test_failures_count_in_a_row_without_tokens_only():
    losses = Losses()
    for number in range(MAX_FAILED - 1):
        losses.add(str(number), has_failed=True, gave_tokens=False)
    losses.add("silent", has_failed=False, gave_tokens=False)
    assert not losses.is_enough
    losses.add("spoke", has_failed=True, gave_tokens=True)
    assert not losses.is_enough
    for number in range(MAX_FAILED - 1):
        assert not losses.is_enough
        losses.add(f"later {number}", has_failed=True, gave_tokens=False)
    assert losses.is_enough


def test_whoever_is_unknown_may_be_any_of_those_known():
    losses = Losses()
    assert losses.leave_another("a")
    losses.add(None, has_failed=False, gave_tokens=False)
    assert not losses.leave_another("a")
    assert losses.leave_another("ab")
    losses.add("a", has_failed=False, gave_tokens=False)
    assert not losses.leave_another("ab")
    assert losses.leave_another("abc")

"""Who is refused at the door costs nothing; who breaks behind it leaves the others alone."""

import pytest

from protos.errors import Overloaded, PeerUnavailable
from protos.generation import FinishReason
from tests.fakes import Client, FakeDrafting, HashTarget, request, small_settings
from verifier_service.engine import intake
from verifier_service.engine.loop import Engine
from verifier_service.engine.request import RunningRequest
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.static_planner import StaticPlanner


def engine_with(**settings: int) -> Engine:
    target = HashTarget(97, max_context=200)
    return Engine(target, FakeDrafting(), StaticPlanner(), small_settings(**settings))


@pytest.mark.parametrize("is_closed", [False, True])
def test_who_is_refused_at_a_full_or_closed_door_costs_no_building(monkeypatch, is_closed: bool):
    engine = engine_with(max_running=1, max_queued=0)
    if is_closed:
        engine.intake.refuse("shutting down")
    else:
        engine.submit(request("in", [1], 5), lambda run: None)
    monkeypatch.setattr(
        intake, "RunningRequest", lambda *args: pytest.fail("built for one who is refused")
    )
    with pytest.raises(PeerUnavailable if is_closed else Overloaded):
        engine.submit(request("late", [1], 5), lambda run: None)


def test_a_request_that_cannot_join_is_answered_and_so_are_those_behind_it(monkeypatch):
    joined = PagedRows.add

    def add(self: PagedRows, running: RunningRequest) -> None:
        if running.request.request_id == "bad":
            raise ValueError("secret detail")
        joined(self, running)

    monkeypatch.setattr(PagedRows, "add", add)
    engine = engine_with()
    client = Client(engine)
    for name in ("before", "bad", "cancelled", "behind"):
        client.submit(request(name, [1], 5))
    engine.cancel(client.keys["cancelled"])
    texts = client.finish()
    assert client.last("bad").finish_reason is FinishReason.ERROR
    assert "secret" not in client.last("bad").error
    assert client.last("cancelled").finish_reason is FinishReason.CANCELLED
    alone = Client(engine_with())
    alone.submit(request("x", [1], 5))
    assert texts["before"] == texts["behind"] == alone.finish()["x"]
    assert engine.intake.num_active == 0
    engine.check_idle()


def test_an_engine_that_dies_while_one_request_leaves_still_answers_those_behind(monkeypatch):
    engine = engine_with()
    client = Client(engine)
    for name in ("bad", "behind"):
        output = [5] if name == "bad" else []
        client.submit(request(name, [1], 1, output=output))
    forget = FakeDrafting.forget

    def forget_once(self: FakeDrafting, key: int) -> None:
        if key == client.keys["bad"]:
            raise ValueError("on its way out")
        forget(self, key)

    monkeypatch.setattr(FakeDrafting, "forget", forget_once)
    with pytest.raises(ValueError, match="way out"):
        engine.step()
    engine.fail_all("the engine died")
    assert client.last("behind").finish_reason is FinishReason.ERROR

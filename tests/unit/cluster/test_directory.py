"""The directory: what drafter replicas answer becomes the running set; silence changes nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.fleet.directory import Directory
from cluster.fleet.messages import DrafterReport
from protos.exchange import Capabilities, DrafterLoad, DrafterReplica, PlanKind
from tests.unit.cluster.serve_fakes import answering


def replica(number: int, *, draining: bool = False) -> DrafterReport:
    capabilities = Capabilities("ngram", "far", 100 + number, (PlanKind.CHAIN,))
    load = DrafterLoad(num_sessions=number)
    return DrafterReport(f"r{number}", number, f"10.0.0.{number}:1", capabilities, load, draining)


class FakeHandle:
    """A deployment handle whose broadcasts answer what the test says."""

    def __init__(self) -> None:
        self.answers: Sequence[object] | Exception = ()

    def broadcast(self, method: str) -> DeploymentBroadcastResponse:
        assert method == "describe"
        return answering(self.answers)


class FakeExchange:
    """Remembers the running sets it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[DrafterReplica]]] = []

    def set_replicas(self, source: str, replicas: Sequence[DrafterReplica]) -> None:
        self.told.append((source, list(replicas)))


def addresses_after(*looks: Sequence[object] | Exception) -> list[list[str]]:
    handle, exchange = FakeHandle(), FakeExchange()

    async def go() -> None:
        directory = Directory({"far": handle}, exchange, 1.0, 1.0)
        for answers in looks:
            handle.answers = answers
            await directory.look()

    asyncio.run(go())
    assert all(source == "far" for source, _ in exchange.told)
    return [[r.address for r in replicas] for _, replicas in exchange.told]


def test_running_replicas_are_offered_and_draining_ones_are_not() -> None:
    assert addresses_after([replica(1), replica(2, draining=True)]) == [["10.0.0.1:1"]]


def test_replicas_that_fail_to_answer_are_left_out() -> None:
    assert addresses_after([replica(1), RuntimeError("dead")]) == [["10.0.0.1:1"]]


def test_a_look_that_fails_changes_nothing() -> None:
    assert addresses_after([replica(1)], TimeoutError()) == [["10.0.0.1:1"]]


def test_one_that_hangs_stays_and_hides_neither_who_came_nor_the_load_of_others() -> None:
    handle, exchange = FakeHandle(), FakeExchange()
    loaded = replace(replica(2), load=DrafterLoad(num_sessions=9))

    async def go() -> None:
        directory = Directory({"far": handle}, exchange, 1.0, 0.05)
        for answers in ([replica(1), replica(2)], [None, loaded, replica(3)]):
            handle.answers = answers
            await directory.look()

    asyncio.run(go())
    _, found = exchange.told[-1]
    sessions = {one.address: one.load.num_sessions for one in found}
    assert sessions == {"10.0.0.1:1": 1, "10.0.0.2:1": 9, "10.0.0.3:1": 3}


def test_no_replica_at_all_empties_the_set() -> None:
    gone = DeploymentUnavailableError.__new__(DeploymentUnavailableError)
    assert addresses_after([replica(1)], gone) == [["10.0.0.1:1"], []]


def test_load_and_incarnation_are_passed_on() -> None:
    handle, exchange = FakeHandle(), FakeExchange()
    handle.answers = [replica(3)]

    async def go() -> None:
        directory = Directory({"far": handle}, exchange, 0.01, 1.0)
        await directory.start()
        while len(exchange.told) < 2:
            await asyncio.sleep(0.01)
        await directory.close()
        assert directory.reports["far"][0].pid == 3

    asyncio.run(go())
    (offered,) = exchange.told[0][1]
    assert (offered.incarnation, offered.load.num_sessions) == (103, 3)


def test_who_gives_q_is_known_before_any_verifier_steps() -> None:
    handle = FakeHandle()
    able = replace(replica(1), capabilities=replace(replica(1).capabilities, gives_q=True))

    async def go() -> list[frozenset[str]]:
        directory = Directory({"far": handle}, FakeExchange(), 1.0, 1.0)
        found = [directory.sources_with_q]
        for answers in ([replica(1)], [replica(2), able]):
            handle.answers = answers
            await directory.look()
            found.append(directory.sources_with_q)
        return found

    assert asyncio.run(go()) == [frozenset(), frozenset(), {"far"}]

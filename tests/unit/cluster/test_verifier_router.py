"""Serve's router for verifiers: what is lost is left out, and who gets a call is known at once.

The real router with replicas that only have a queue; Ray does not run.
"""

import asyncio
import pickle
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeVar

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.constants import DEFAULT_REQUEST_ROUTER_PATH
from ray.serve.request_router import PendingRequest, ReplicaID

from cluster.config import ClusterConfig
from cluster.fleet.app import VERIFIER, build_app
from cluster.fleet.failover import Ticket
from cluster.fleet.verifier_router import VerifierRouter

Result = TypeVar("Result")

DEPLOYMENT = DeploymentID("verifier", "outrider")


class Replica:
    """What the router sees of a replica. `queue_len` None: it hangs and says nothing."""

    availability_zone = None
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(
        self, name: str, queue_len: int | None = 0, most: int = 8, node: str = "n"
    ) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.queue_len = queue_len
        self.max_ongoing_requests = most
        self.node_id = node

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.queue_len is None:
            await asyncio.Event().wait()
        return self.queue_len


def routed(
    replicas: Iterable[Replica],
    scenario: Callable[[VerifierRouter], Coroutine[object, object, Result]],
    is_near: bool = False,
) -> Result:
    """What the scenario gives, with a router that knows these replicas' queues."""

    async def play() -> Result:
        router = VerifierRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            self_node_id="n",
            prefer_local_node_routing=is_near,
            use_replica_queue_len_cache=True,
            initial_backoff_s=0.001,
            max_backoff_s=0.002,
        )
        router.update_replicas(list(replicas))
        for replica in replicas:
            if replica.queue_len is not None:
                router.on_new_queue_len_info(replica.replica_id, replica.queue_len)
        return await scenario(router)

    return asyncio.run(play())


def call(*args: object, internal_id: str = "") -> PendingRequest:
    """A handle call. Calls of one HTTP request share the internal id."""
    number = internal_id or str(random.getrandbits(64))
    return PendingRequest(args=list(args), kwargs={}, metadata=RequestMetadata("r", number))


async def choose(router: VerifierRouter, pending: PendingRequest, is_retry: bool = False) -> str:
    replica = await router._choose_replica_for_request(pending, is_retry=is_retry)
    return replica.replica_id.unique_id


@pytest.mark.parametrize(
    ("lost", "suspects", "allowed"),
    [
        ("a", "", "bcd"),
        ("", "a", "bcd"),
        ("a", "b", "cd"),
        ("ab", "cd", "cd"),
        ("", "abcd", "abcd"),
        ("abcd", "a", "abcd"),
        ("abcd", "abcd", "abcd"),
        ("xy", "z", "abcd"),
    ],
)
def test_lost_ones_are_left_out_while_others_exist(lost, suspects, allowed):
    async def draw(router: VerifierRouter) -> set[str]:
        found = set()
        for _ in range(100):
            ticket = Ticket(frozenset(lost), frozenset(suspects))
            name = await choose(router, call("request", ticket))
            assert ticket.replica_id == name
            found.add(name)
        return found

    # The ones to keep away from are those with nothing to do.
    idle = {name for name in "abcd" if name not in allowed}
    assert routed([Replica(n, 0 if n in idle else 3) for n in "abcd"], draw) == set(allowed)


def test_the_ticket_names_a_replica_that_never_answers():
    """Serve tells a router who took a call only once that one has accepted it."""

    async def go(router: VerifierRouter) -> list[str | None]:
        ticket = Ticket()
        pending = call("request", ticket)
        names = [ticket.replica_id]
        # It hangs, but its queue was empty when it last said so.
        router.on_new_queue_len_info(ReplicaID("a", DEPLOYMENT), 0)
        await choose(router, pending)
        return [*names, ticket.replica_id]

    assert routed([Replica("a", None)], go) == [None, "a"]


def test_a_call_that_nobody_takes_names_nobody():
    async def go(router: VerifierRouter) -> list[str | None]:
        ticket = Ticket()
        ticket.replica_id = "who had it before"
        task = asyncio.create_task(choose(router, call("request", ticket)))
        await asyncio.sleep(0.02)
        names = [ticket.replica_id]
        full.queue_len = 1
        names.append(await task)
        return [*names, ticket.replica_id]

    full = Replica("a", 2, most=2)
    assert routed([full], go) == [None, "a", "a"]


def test_a_call_waits_for_a_full_replica_rather_than_go_back():
    async def go(router: VerifierRouter) -> str:
        task = asyncio.create_task(choose(router, call("request", Ticket(frozenset("a")))))
        await asyncio.sleep(0.02)
        assert not task.done()
        full.queue_len = 1
        return await task

    full = Replica("b", 2, most=2)
    assert routed([Replica("a"), full], go) == "b"


def test_a_call_that_is_refused_is_asked_for_anew():
    async def go(router: VerifierRouter) -> list[str]:
        ticket = Ticket()
        pending = call("request", ticket)
        first = await choose(router, pending)
        router.on_replica_actor_died(ReplicaID(first, DEPLOYMENT))
        second = await choose(router, pending, is_retry=True)
        assert ticket.replica_id == second
        return sorted([first, second])

    assert routed([Replica("a"), Replica("b")], go) == ["a", "b"]


def test_a_call_that_was_refused_names_nobody_while_it_waits_its_turn():
    """Only so many calls are chosen for at a time; the others wait in the queue."""

    async def go(router: VerifierRouter) -> None:
        ticket = Ticket()
        refused = call("request", ticket)
        assert await choose(router, refused) == "a"
        full.queue_len = full.max_ongoing_requests
        router.on_new_queue_len_info(full.replica_id, full.queue_len)
        others = [asyncio.create_task(choose(router, call("before it"))) for _ in range(8)]
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(choose(router, refused, is_retry=True))
        await asyncio.sleep(0)
        assert ticket.replica_id is None
        full.queue_len = 0
        await asyncio.gather(waiting, *others)
        assert ticket.replica_id == "a"

    full = Replica("a", 0, most=2)
    routed([full], go)


def test_choosing_once_more_for_a_call_that_was_given_away_forgets_nobody():
    """The replica chosen for a call that left may be given to one whose choice still goes on."""

    async def go(router: VerifierRouter) -> None:
        ticket = Ticket()
        pending = call("request", ticket)
        await choose(router, pending)
        await router.choose_replicas(list(router.curr_replicas.values()), pending)
        assert ticket.replica_id == "a"

    routed([Replica("a")], go)


def test_a_call_that_waits_goes_where_its_ticket_says_by_now():
    async def go(router: VerifierRouter) -> str:
        ticket = Ticket(suspects=frozenset("b"))
        waiting = asyncio.create_task(choose(router, call("request", ticket)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        ticket.suspects = frozenset("a")
        return await waiting

    assert routed([Replica("a", 2, most=2), Replica("b", 1)], go) == "b"


def test_of_two_healthy_ones_the_shorter_queue_is_taken():
    async def go(router: VerifierRouter) -> set[str]:
        calls = [call("request", Ticket(frozenset("c"))), call("no ticket")]
        return {await choose(router, pending) for pending in calls}

    assert routed([Replica("a", 5), Replica("b", 2), Replica("c", 7)], go) <= {"a", "b"}
    shorter = [Replica("a", 5), Replica("b", 2)]
    for _ in range(20):
        assert routed(shorter, go) == {"b"}


@pytest.mark.parametrize(
    ("lost", "expected"), [("", "near"), ("near", "far"), ("far", "near"), ("near far", "near")]
)
def test_near_ones_come_first_unless_they_were_lost(lost, expected):
    async def go(router: VerifierRouter) -> str:
        return await choose(router, call("request", Ticket(frozenset(lost.split()))))

    replicas = [Replica("near", 4), Replica("far", 0, node="m")]
    assert routed(replicas, go, is_near=True) == expected


def test_each_call_of_a_crowd_gets_what_was_chosen_for_it():
    """Choices of one HTTP request come at once, under one id, each with its own losses."""

    async def go(router: VerifierRouter) -> None:
        chance = random.Random(0)
        tickets = [Ticket(frozenset(chance.choice("abcd"))) for _ in range(60)]
        ids = [f"http {at // 3}" for at in range(60)]
        pending = [call("r", t, internal_id=i) for t, i in zip(tickets, ids, strict=True)]
        tasks = [asyncio.create_task(choose(router, one)) for one in pending]
        leaving = tasks[::7]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        async with asyncio.timeout(20):
            names = await asyncio.gather(*tasks, return_exceptions=True)
        for ticket, name, task in zip(tickets, names, tasks, strict=True):
            if task in leaving:
                assert isinstance(name, asyncio.CancelledError)
            else:
                assert name == ticket.replica_id
                assert name not in ticket.lost
        assert router.num_pending_requests == 0

    routed([Replica(name, most=1000) for name in "abcd"], go)


def test_a_replica_gets_nothing_of_the_ticket():
    ticket = Ticket(frozenset("a" * 100 for _ in range(3)), frozenset(map(str, range(1000))))
    packed = pickle.dumps(ticket)
    assert len(packed) < 100
    read = pickle.loads(packed)
    assert (read.lost, read.suspects, read.replica_id) == (frozenset(), frozenset(), None)


def test_only_the_verifiers_are_routed_to_in_this_way():
    document = {"drafters": [{"name": "one", "kind": "ngram"}]}
    app = build_app(ClusterConfig.model_validate(document))
    classes, waiting = {}, [app]
    while waiting:
        deployment = waiting.pop()._bound_deployment
        settings = deployment._deployment_config.request_router_config
        classes[deployment.name] = settings.get_request_router_class().__name__
        values = [*deployment.init_args, *deployment.init_kwargs.values()]
        values += [v for value in values if isinstance(value, dict) for v in value.values()]
        waiting += [value for value in values if isinstance(value, type(app))]
    usual = DEFAULT_REQUEST_ROUTER_PATH.rpartition(":")[2].rpartition(".")[2]
    assert classes.pop(VERIFIER) == VerifierRouter.__name__
    assert len(classes) == 2
    assert set(classes.values()) == {usual}

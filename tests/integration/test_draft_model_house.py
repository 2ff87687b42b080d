"""A draft model beside a real target: the target's text, all of a chain accepted when it is a copy.

PERFECT is a copy of the target, NOISY another model of its size. In-process and over gRPC.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.draft_model.load import load_draft_model
from drafter_service.server import DrafterServer
from protos.channel import Security
from protos.exchange import DrafterReplica, Plan, PlanKind
from protos.params import Acceptance
from tests.fakes import Client, FakeDrafting, request, small_settings
from tests.integration.exchange_house import until
from tests.tiny import tiny_llama_dir
from verifier_service.engine import drafting, rejection
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target

VOCAB = 384
CHAIN = Plan(PlanKind.CHAIN, 4)
TREE = Plan(PlanKind.TREE, 4, 3, 12)
NUM_OUTPUT = 41
"""The prompt's own step gives one token, eight rounds of five the rest."""

PATIENCE_S = 10.0
"""Far longer than a draft takes on any machine: counts of drafts do not depend on its speed."""

REQUESTS = [
    request("greedy", range(10, 30), NUM_OUTPUT, ignore_eos=True),
    request("warm", range(40, 57), NUM_OUTPUT, ignore_eos=True, temperature=1.0, seed=7),
    request("cut", range(9, 90), NUM_OUTPUT, ignore_eos=True, temperature=0.7, seed=-1, top_p=0.9),
]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Every draft is waited for, however slow the machine."""
    monkeypatch.setattr(drafting, "MAX_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(rejection, "MIN_WAIT_S", PATIENCE_S)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"), layers=2)


@pytest.fixture(scope="module")
def noisy_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("noisy"), seed=5, layers=1)


@pytest.fixture(scope="module")
def target(target_dir):
    return load_target(target_dir, torch.float32)


@pytest.fixture(scope="module")
def plain(target):
    client = Client(Engine(target, FakeDrafting(), StaticPlanner(), sizes()))
    for one in REQUESTS:
        client.submit(one)
    return client.finish()


def sizes():
    return small_settings(
        page_size=16, num_slots=2048, max_prefill_chunk=64, max_draft_wait_s=PATIENCE_S
    )


def drafter_of(directory, target_dir):
    settings = DrafterSettings(
        kind="draft_model",
        name="small",
        checkpoint=str(directory),
        dtype="fp32",
        device="cpu",
        limits=DrafterLimits(cache_mb=8, max_context=1024),
    )
    return load_draft_model(settings, target_dir, 5)


def house(target, plan, security=None):
    rows = PagedRows(target)
    facts = target.facts
    settings = ExchangeSettings() if security is None else ExchangeSettings(security)
    exchange = DraftExchange(
        TargetEnd(facts.vocab_size, facts.max_context, facts.digest), rows, settings
    )
    planner = StaticPlanner([SourcePlan("small", plan)], PATIENCE_S)
    return exchange, Client(Engine(target, exchange, planner, sizes(), rows))


@contextmanager
def served(drafter, security) -> Iterator[str]:
    """The drafter behind gRPC on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = DrafterServer(drafter, security, "127.0.0.1", 0, 64)
    try:
        port = asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
        yield f"127.0.0.1:{port}"
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def finish(client, requests=REQUESTS):
    for one in requests:
        client.submit(one)
    return client.finish()


@pytest.mark.parametrize("plan", [CHAIN, TREE])
def test_a_copy_reaches_the_full_length_and_gives_the_same_text(target, target_dir, plain, plan):
    exchange, client = house(target, plan)
    exchange.add_local(drafter_of(target_dir, target_dir))
    assert finish(client) == plain
    for name in client.runs:
        lengths = [len(run.ids) for run in client.runs[name]]
        if plan is CHAIN:
            assert lengths == [1, 5, 5, 5, 5, 5, 5, 5, 5], name
        else:
            # A tree is cut by summed scores, which may drop deep nodes, never the first right one.
            assert min(lengths[1:-1]) >= 2, name
    exchange.close()


@pytest.mark.parametrize("plan", [CHAIN, TREE])
def test_another_model_gives_the_same_text(target, target_dir, noisy_dir, plain, plan):
    exchange, client = house(target, plan)
    exchange.add_local(drafter_of(noisy_dir, target_dir))
    assert finish(client) == plain
    assert all(client.last(name).counts.num_drafted > 50 for name in client.runs)
    exchange.close()


def test_it_drafts_over_grpc_as_in_process(target, target_dir, plain):
    security = Security(token="secret")
    with served(drafter_of(target_dir, target_dir), security) as address:
        exchange, client = house(target, CHAIN, security)
        exchange.set_replicas("small", [DrafterReplica(address)])
        until(lambda: exchange.sources())
        assert finish(client) == plain
        assert client.last("greedy").counts.num_accepted == 4 * 8
        exchange.close()


def test_chains_for_rejection_travel_with_their_q(target, target_dir):
    """A copy's q is the target's p but for its 64 best ids, so nearly all is accepted."""
    rejected = [
        request(
            f"r{seed}",
            range(10, 30),
            40,
            ignore_eos=True,
            temperature=0.6,
            top_k=40,
            seed=seed,
            acceptance=Acceptance.REJECTION,
        )
        for seed in range(4)
    ]
    exchange, client = house(target, TREE)
    exchange.add_local(drafter_of(target_dir, target_dir))
    assert exchange.local_sources_with_q() == {"small"}
    in_process = finish(client, rejected)
    for name in client.runs:
        counts = client.last(name).counts
        assert counts.num_accepted > 0.9 * counts.num_drafted
    exchange.close()
    security = Security(token="secret")
    with served(drafter_of(target_dir, target_dir), security) as address:
        exchange, client = house(target, TREE, security)
        exchange.set_replicas("small", [DrafterReplica(address)])
        until(lambda: exchange.sources())
        assert exchange.local_sources_with_q() == exchange.refused_sources() == frozenset()
        assert finish(client, rejected) == in_process
        exchange.close()

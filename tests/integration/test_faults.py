"""Real drafter processes behind a TCP proxy: stopped, killed, cut, delayed, cut within a frame.

The text equals the run without drafters whatever happens, no request fails, and drafting is back
afterwards. The n-gram drafter is checked through all of it, EAGLE-3 (a tiny head on a tiny Llama,
fused rows over both streams) through the faults that lose rows.
"""

import pickle
import signal
from dataclasses import replace

import pytest
import torch

from drafter_service.build import build_drafter
from drafter_service.checkpoint.describe import describe
from drafter_service.config import DrafterSettings
from protos.channel import Security
from protos.exchange import DrafterReplica, Plan, PlanKind
from protos.features import FeatureForm
from protos.generation import FinishReason, GenerationRequest
from protos.params import SamplingParams
from tests.fakes import Client
from tests.integration.drafter_process import Drafters, write_tiny_head
from tests.integration.exchange_house import until
from tests.integration.proxy import Proxy
from tests.tiny import tiny_llama_dir
from verifier_service.engine.draft_form import RowForm, TargetEnd
from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target
from verifier_service.step import TapSpec

TOKEN = "secret"
TREE = Plan(PlanKind.TREE, depth=4, width=3, nodes=12)
PLANS = {"ngram": Plan(PlanKind.CHAIN, depth=6), "eagle3": TREE}
NUM_OUTPUT = 60
IDLE_S = 1.5
"""A drafter drops a session that was unused for so long."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def model(folder):
    """(target directory, head directory, loaded target that keeps the head's fused rows)."""
    target_dir = tiny_llama_dir(folder / "target")
    head_dir = write_tiny_head(folder / "head")
    projection = describe(head_dir).projection
    tap = TapSpec(projection.digest, projection.aux_layers, projection)
    return target_dir, head_dir, load_target(target_dir, torch.float32, (tap,))


def drafter_settings(kind, model):
    target_dir, head_dir, _ = model
    if kind == "ngram":
        return {"kind": "ngram"}
    checkpoint = {"checkpoint": str(head_dir), "target": str(target_dir), "dtype": "fp32"}
    return {"kind": "eagle3", **checkpoint}


@pytest.fixture(scope="module")
def drafters(folder, model):
    processes = Drafters(
        folder, TOKEN, lambda kind: drafter_settings(kind, model) | {"idle_session_s": IDLE_S}
    )
    yield processes
    processes.close()


def some_requests():
    prompts = [[3 + (11 * n + 5 * j + j * j) % 381 for j in range(30 + 90 * n)] for n in range(4)]
    return [
        GenerationRequest(
            f"r{n}",
            tuple(prompt),
            SamplingParams(
                temperature=0.8 * (n % 2), seed=n, max_tokens=NUM_OUTPUT, ignore_eos=True
            ),
        )
        for n, prompt in enumerate(prompts)
    ]


class Verifier:
    """Engine and exchange over the tiny Llama."""

    def __init__(self, model, plans, deadline_s=0.25, spoil=lambda rows: rows):
        target = model[2]
        rows = PagedRows(target)

        def read_rows(key, tap, start, end):
            return spoil(rows(key, tap, start, end))

        facts = target.facts
        tap = describe(model[1]).digest
        forms = {tap: RowForm(FeatureForm.FUSED, target.row_width(tap), target.row_dtype(tap), tap)}
        end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, forms)
        self.exchange = DraftExchange(end, read_rows, ExchangeSettings(Security(token=TOKEN)))
        settings = EngineSettings(
            page_size=16, num_slots=4096, max_prefill_chunk=64, max_draft_wait_s=2.0
        )
        self.engine = Engine(
            target, self.exchange, StaticPlanner(plans, deadline_s), settings, rows
        )
        self.client = Client(self.engine)

    def offer(self, source, *addresses):
        self.exchange.set_replicas(source, [DrafterReplica(a) for a in addresses])
        self.wait_for(source)

    def wait_for(self, source):
        until(lambda: any(info.name == source for info in self.exchange.sources()))

    def in_time(self, source):
        counts = self.exchange.counts().get(source)
        return counts.in_time if counts else 0

    def step_until(self, condition, limit=2000):
        for _ in range(limit):
            if condition():
                return
            assert self.engine.step(), "everything finished first"
        raise AssertionError("it never happened")


@pytest.fixture(scope="module")
def truth(model):
    verifier = Verifier(model, [])
    for request in some_requests():
        verifier.client.submit(request)
    texts = verifier.client.finish()
    verifier.engine.close()
    return texts


@pytest.fixture
def verify(model):
    """Makes a verifier behind a proxy in front of a drafter; closes all of it."""
    made = []

    def make(kind, process, deadline_s=0.25):
        proxy = Proxy(process.port).start()
        verifier = Verifier(model, [SourcePlan(kind, PLANS[kind])], deadline_s)
        made.append((verifier, proxy))
        verifier.offer(kind, proxy.address)
        return verifier, proxy

    yield make
    for verifier, proxy in made:
        verifier.engine.close()
        proxy.stop()


def start_drafting(verifier, kind):
    """Submit everything and step until drafts flow for all."""
    for request in some_requests():
        verifier.client.submit(request)
    verifier.step_until(lambda: verifier.in_time(kind) > 8)


def assert_untouched(verifier, truth):
    assert verifier.client.finish() == truth
    reasons = [runs[-1].finish_reason for runs in verifier.client.runs.values()]
    assert reasons == [FinishReason.LENGTH] * len(reasons)


def assert_drafting_again(verifier, kind):
    """A fresh request is drafted for."""
    verifier.wait_for(kind)
    before = verifier.in_time(kind)
    request = some_requests()[0]
    verifier.client.submit(GenerationRequest("again", request.prompt_ids, request.params))
    verifier.client.finish()
    assert verifier.in_time(kind) > before


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_a_healthy_drafter_and_then_every_fault_of_the_line(kind, drafters, verify, truth):
    process = drafters.get(kind)
    verifier, proxy = verify(kind, process)
    start_drafting(verifier, kind)
    proxy.cut()
    verifier.step_until(lambda: not verifier.exchange.sources(), limit=50_000)
    assert_untouched(verifier, truth)
    assert_drafting_again(verifier, kind)

    for fault in (proxy.cut_within_next_frame, proxy.stall, proxy.cut):
        for request in some_requests():
            verifier.client.submit(request)
        for _ in range(8):
            verifier.engine.step()
        fault()
        assert_untouched(verifier, {**truth, "again": verifier.client.ids("again")})
        proxy.flow()
        assert_drafting_again(verifier, kind)

    proxy.delay_s = 0.02
    for request in some_requests():
        verifier.client.submit(request)
    assert_untouched(verifier, {**truth, "again": verifier.client.ids("again")})
    counts = verifier.exchange.counts()[kind]
    assert counts.malformed == 0
    assert counts.refused == 0


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_a_stopped_drafter_costs_a_deadline_and_comes_back(kind, drafters, verify, truth):
    process = drafters.get(kind)
    verifier, _ = verify(kind, process)
    start_drafting(verifier, kind)
    verifier.wait_for(kind)
    before = verifier.exchange.counts()[kind].unanswered
    process.send(signal.SIGSTOP)
    try:
        verifier.step_until(lambda: not verifier.exchange.sources())
        unanswered = verifier.exchange.counts()[kind].unanswered - before
        assert 0 < unanswered <= len(truth), "all were asked once, then it was left alone"
        assert_untouched(verifier, truth)
    finally:
        process.send(signal.SIGCONT)
    assert_drafting_again(verifier, kind)


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_a_killed_drafter_is_replaced_in_the_middle(kind, drafters, verify, truth):
    verifier, proxy = verify(kind, drafters.get(kind))
    start_drafting(verifier, kind)
    drafters.kill(kind)
    verifier.step_until(lambda: not verifier.exchange.sources(), limit=50_000)
    runs_of = verifier.client.runs
    unfinished = [r for r, runs in runs_of.items() if not (runs and runs[-1].finish_reason)]
    proxy.target_port = drafters.get(kind).port
    verifier.wait_for(kind)
    before = verifier.in_time(kind)
    assert_untouched(verifier, truth)
    assert unfinished
    assert verifier.in_time(kind) > before, "drafting resumed for the same requests"


def test_sessions_end_after_close_and_after_a_vanished_verifier(drafters, model):
    process = drafters.get("ngram")
    assert process.refuses_strangers()
    verifier = Verifier(model, [SourcePlan("ngram", PLANS["ngram"])])
    verifier.offer("ngram", process.address)
    start_drafting(verifier, "ngram")
    assert process.load().num_sessions == 4
    verifier.client.finish()
    until(lambda: process.load().num_sessions == 0)

    start = some_requests()[1]
    verifier.client.submit(GenerationRequest("left", start.prompt_ids, start.params))
    verifier.step_until(lambda: process.load().num_sessions == 1)
    # The verifier goes without a word: nothing is closed, its request is never stepped again.
    until(lambda: process.load().num_sessions == 0)
    verifier.engine.close()


def test_in_process_and_remote_draft_the_same_trees(drafters, model):
    """The same plans, answered in time, give the same drafts round by round.

    Prompts of one chunk, whose rows ride inline: what a drafter makes of rows that are still under
    way is a matter of timing.
    """
    requests = [
        GenerationRequest(f"s{t}", r.prompt_ids[:60], replace(r.params, temperature=t))
        for t, r in zip((0.0, 0.9), some_requests()[1:3], strict=True)
    ]
    process = drafters.get("eagle3")
    rounds, texts = {}, []
    for place in ("local", "remote"):
        verifier = Verifier(model, [SourcePlan("eagle3", TREE)], deadline_s=2.0)
        if place == "local":
            settings = DrafterSettings(**drafter_settings("eagle3", model))
            verifier.exchange.add_local(build_drafter(settings), "eagle3")
        else:
            verifier.offer("eagle3", process.address)
        rounds[place] = record_drafts(verifier.exchange)
        for request in requests:
            verifier.client.submit(request)
            verifier.client.finish()
        texts.append(verifier.client.texts())
        verifier.engine.close()
    assert texts[0] == texts[1]
    assert len(rounds["local"]) > 20
    assert rounds["local"] == rounds["remote"]


def record_drafts(exchange):
    """Every draft that the exchange hands out from now on: (base_len, tokens, parents)."""
    seen = []
    plain = exchange.exchange

    def recorded(asks, deadline_s):
        answered = plain(asks, deadline_s)
        for drafts in answered.values():
            seen.extend((d.base_len, d.tree.tokens, d.tree.parents) for d in drafts)
        return answered

    exchange.exchange = recorded
    return seen


def test_pickled_rows_do_nothing_to_a_drafter(drafters, model, tmp_path):
    """A pickle in the one bytes field that a verifier sends."""
    bomb = tmp_path / "bomb"
    payload = pickle.dumps(_Bomb(str(bomb)))

    def pickled(rows):
        data = (payload * (len(rows.data) // len(payload) + 1))[: len(rows.data)]
        return replace(rows, data=data)

    process = drafters.get("eagle3")
    verifier = Verifier(model, [SourcePlan("eagle3", TREE)], spoil=pickled)
    verifier.offer("eagle3", process.address)
    verifier.client.submit(some_requests()[1])
    verifier.client.finish()
    assert process.load().num_sessions == 0
    assert process.process.poll() is None
    assert not bomb.exists()
    verifier.engine.close()


class _Bomb:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (self._path, "w")

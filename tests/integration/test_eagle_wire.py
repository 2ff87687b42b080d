"""Perfect EAGLE heads in processes of their own: accepted whole across gRPC, and the same text."""

import time

import pytest
import torch

from drafter_service.checkpoint.describe import describe
from protos.channel import Security
from protos.digest import directory_digest
from protos.exchange import STATIC_PLAN, DrafterReplica, Plan, PlanKind
from protos.features import FeatureForm
from tests.fakes import Client, FakeDrafting, request, small_settings
from tests.integration.drafter_process import DrafterProcess
from tests.perfect_heads.overfit import HERE, NUM_OUTPUT, PROMPTS, target_dir
from verifier_service.engine import drafting
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target
from verifier_service.pairing import row_form
from verifier_service.step import TapSpec

TOKEN = "secret"
CHAIN = Plan(PlanKind.CHAIN, depth=5)
HEADS = {"eagle": ("eagle", FeatureForm.RAW), "peagle": ("eagle3", FeatureForm.FUSED)}
PATIENCE_S = 10.0
"""Far longer than a draft takes on any machine: what is accepted does not depend on its speed."""
SIZES = small_settings(
    page_size=16, num_slots=4096, max_prefill_chunk=64, max_draft_wait_s=PATIENCE_S
)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Every draft is waited for, however slow the machine."""
    monkeypatch.setattr(drafting, "MAX_WAIT_S", PATIENCE_S)


@pytest.fixture(scope="module")
def known_target(tmp_path_factory):
    directory = target_dir(tmp_path_factory.mktemp("known"))
    if directory_digest(directory) != (HERE / "target_digest.txt").read_text().strip():
        pytest.skip("another torch draws another target: run tests.perfect_heads.overfit")
    return directory


@pytest.fixture(scope="module", params=HEADS)
def remote(request, known_target, tmp_path_factory):
    """(source name, target with the head's rows, its end of the wire, running drafter)."""
    kind, form = HEADS[request.param]
    described = describe(HERE / request.param)
    tap = TapSpec(described.digest, described.aux_layers, described.projection)
    target = load_target(known_target, torch.float32, [tap])
    facts = target.facts
    rows = row_form(tap, target.row_width(tap.key), target.row_dtype(tap.key))
    assert rows.form is form
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, {tap.key: rows})
    process = DrafterProcess(
        tmp_path_factory.mktemp(request.param),
        TOKEN,
        kind=kind,
        checkpoint=str(HERE / request.param),
        target=str(known_target),
        dtype="fp32",
    )
    yield target, end, process
    process.kill()


def some_requests():
    sampled = {"temperature": 0.9, "seed": 5}
    return [
        request(str(n), prompt, NUM_OUTPUT, ignore_eos=True, **(sampled if n == 2 else {}))
        for n, prompt in enumerate(PROMPTS)
    ]


def run(target, drafting, plans=(), rows=None):
    engine = Engine(target, drafting, StaticPlanner(plans, deadline_s=PATIENCE_S), SIZES, rows)
    client = Client(engine)
    for one in some_requests():
        client.submit(one)
    return client.finish(), client, engine


@pytest.mark.parametrize("plan", [CHAIN, STATIC_PLAN], ids=["chain", "static"])
def test_a_perfect_head_is_accepted_whole_across_the_wire(remote, plan):
    target, end, process = remote
    rows = PagedRows(target)
    exchange = DraftExchange(end, rows, ExchangeSettings(Security(token=TOKEN)))
    exchange.set_replicas("head", [DrafterReplica(process.address)])
    limit = time.monotonic() + 30
    while not any(info.name == "head" for info in exchange.sources()):
        assert time.monotonic() < limit, "the drafter cannot be asked"
        time.sleep(0.02)
    texts, client, engine = run(target, exchange, [SourcePlan("head", plan)], rows)
    engine.close()
    plain, _, _ = run(target, FakeDrafting())
    assert texts == plain
    for name in ("0", "1"):
        *rounds, _ = [len(step.ids) for step in client.runs[name] if step.ids][1:]
        assert max(rounds) == plan.depth + 1
        whole = rounds.count(plan.depth + 1)
        assert whole >= len(rounds) - 1 if plan is CHAIN else whole >= 0.6 * len(rounds)

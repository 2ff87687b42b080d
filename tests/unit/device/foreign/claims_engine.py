"""An engine whose target is on a foreign device commits what it commits on the CPU."""

import random

import pytest
import torch

from drafter_service.build import build_drafter
from drafter_service.config import DrafterSettings
from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest
from protos.params import Acceptance, SamplingParams
from protos.sparse import SparseQ
from tests.tiny import tiny_llama_dir
from tests.unit.device.foreign.far_device import FAR, Traffic, far_device
from tests.unit.sampling.test_choice import random_params
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.choice_batch import choose_batch
from verifier_service.sampling.rejection import Proposal

TREE = (SourcePlan("ngram", Plan(PlanKind.TREE, depth=4, width=2, nodes=8)),)
VALUES = (
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.8},
    {"temperature": 1.0, "seed": 5, "top_k": 9, "min_p": 0.02},
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"), seed=1, layers=1)


def make_engine(directory, device: torch.device, plans: tuple[SourcePlan, ...]) -> Engine:
    target = load_target(directory, torch.float32, device=device)
    rows, facts = PagedRows(target), target.facts
    exchange = DraftExchange(TargetEnd(facts.vocab_size, facts.max_context, facts.digest), rows)
    exchange.add_local(build_drafter(DrafterSettings(kind="ngram", name="ngram")), "ngram")
    # Few pages: requests are preempted and come back.
    settings = EngineSettings(page_size=16, num_slots=160, max_prefill_chunk=32)
    return Engine(target, exchange, StaticPlanner(plans), settings, rows)


def texts(engine: Engine) -> list[list[int]]:
    """What four requests of different sampling values become."""
    found: dict[str, list[int]] = {}
    for number, values in enumerate(VALUES):
        prompt = ([7, 8, 9, 10 + number] * 14)[: 30 + number]
        params = SamplingParams(max_tokens=24, ignore_eos=True, **values)
        request = GenerationRequest(str(number), tuple(prompt), params)
        engine.submit(request, lambda run: found.setdefault(run.request_id, []).extend(run.ids))
    while engine.step():
        pass
    engine.check_idle()
    return [found[str(number)] for number in range(len(VALUES))]


def test_texts_drafted_or_not_are_those_of_the_cpu(directory):
    engine = make_engine(directory, torch.device("cpu"), TREE)
    expected = texts(engine)
    assert engine.stats().num_accepted > 0
    assert engine.stats().num_preemptions > 0
    with far_device():
        assert texts(make_engine(directory, FAR, TREE)) == expected
        assert texts(make_engine(directory, FAR, ())) == expected


def reads_of_a_step(engine: Engine, traffic: Traffic, values: dict[str, object]) -> set[int]:
    """How often one decoding step waits for the device, over some steps."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, **values)
    for number in range(3):
        request = GenerationRequest(str(number), (5, 6, 5, 6, 5, 6, number), params)
        engine.submit(request, lambda run: None)
    engine.step()
    counts = set()
    while True:
        before = traffic.read
        if not engine.step():
            return counts
        counts.add(traffic.read - before)


@pytest.mark.parametrize(
    ("values", "most"),
    [({"temperature": 0.0}, 1), ({"temperature": 1.0}, 1), ({"top_p": 0.9}, 2)],
    ids=["greedy", "sampled", "filtered"],
)
def test_a_step_waits_for_the_device_once_and_once_more_for_filters(directory, values, most):
    with far_device() as traffic:
        engine = make_engine(directory, FAR, TREE)
        assert reads_of_a_step(engine, traffic, values) == {most}


def test_choices_in_a_batch_are_those_of_the_cpu():
    rng = random.Random(3)
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(3)) * 3
    rows = [ChoiceRow(rng.randrange(9), random_params(rng), rng.randrange(99)) for _ in range(60)]
    with far_device():
        assert choose_batch(logits.to(FAR), rows) == choose(logits, rows)


@pytest.mark.parametrize("values", [{}, {"top_p": 0.8, "top_k": 30}], ids=["plain", "filtered"])
def test_choices_by_rejection_are_those_of_the_cpu(values):
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(6))
    q = SparseQ(ids=(3, 7, 9), weights=(1, 2, 1))
    proposals = (None, Proposal(3, q), Proposal(7, q))
    rows = []
    for number in range(24):
        params = SamplingParams(seed=number, acceptance=Acceptance.REJECTION, **values)
        rows.append(ChoiceRow(number % 8, params, 20 + number, proposals[number % 3]))
    with far_device():
        assert choose_batch(logits.to(FAR), rows) == choose(logits, rows)

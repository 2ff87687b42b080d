"""Law 1 where trees fall into parts: bf16, texts that cross a multiple of 512 positions.

On a machine whose torch kernel keeps rows apart (AMX) trees are packed; elsewhere they attend in
tiles, and the claim is the same.
"""

import pytest
import torch

from protos.exchange import Plan, PlanKind
from tests.fakes import (
    Client,
    FakeDrafting,
    future_source,
    random_source,
    request,
    small_settings,
)
from tests.tiny import tiny_llama_dir
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner, SourcePlan
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target
from verifier_service.planning.costs import VerifyCosts, VerifyTable
from verifier_service.planning.planner import AdaptivePlanner
from verifier_service.step import Target

VOCAB = 384
PROMPT_LENS = (455, 496, 1000)
NUM_OUTPUT = 48
SAMPLING = ({}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.0, "seed": -3, "top_p": 0.9})
TABLE = VerifyTable({1: 0.03, 64: 0.045}, {4: 0.001, 32: 0.002}, 200, 3e-6)

Texts = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(
        tiny_llama_dir(tmp_path_factory.mktemp("llama"), vocab=VOCAB), torch.bfloat16
    )


def run(target: Target, planner: Planner, drafting: FakeDrafting) -> Texts:
    settings = small_settings(page_size=16, num_slots=4096, max_prefill_chunk=256)
    engine = Engine(target, drafting, planner, settings)
    client = Client(engine)
    for n, length in enumerate(PROMPT_LENS):
        client.submit(
            request(f"r{n}", prompt(n, length), NUM_OUTPUT, ignore_eos=True, **SAMPLING[n])
        )
        if not drafting.drafters:
            client.finish()
    texts = client.finish()
    engine.check_idle()
    return texts


def prompt(number: int, length: int) -> list[int]:
    return [3 + (11 * number + 5 * j + j * j) % (VOCAB - 3) for j in range(length)]


def test_parts_and_cuts_leave_every_text_alone(target: Target):
    assert target.facts.invariant, target.facts.invariance_note
    truth = run(target, StaticPlanner(), FakeDrafting())
    futures = {f"r{n}": [*prompt(n, at), *truth[f"r{n}"]] for n, at in enumerate(PROMPT_LENS)}

    def drafting() -> FakeDrafting:
        good = future_source(futures, VOCAB, 0.2)
        return FakeDrafting({"good": good, "liar": random_source(VOCAB)})

    plan = Plan(PlanKind.TREE, depth=5, width=8, nodes=31)
    static = StaticPlanner([SourcePlan("good", plan), SourcePlan("liar", plan)])
    assert run(target, static, drafting()) == truth
    adaptive = AdaptivePlanner(VerifyCosts(TABLE, target.tree_parts))
    assert run(target, adaptive, drafting()) == truth
    assert adaptive.counts.num_drafted > adaptive.counts.num_accepted > 0

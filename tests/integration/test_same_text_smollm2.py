"""Law 1 on SmolLM2 in bf16: chains, trees, lies and preemption leave every text alone."""

from pathlib import Path

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
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target
from verifier_service.step import Target

NUM_OUTPUT = 24
SAMPLING = ({}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"temperature": 1.0, "seed": -4})
PROMPTS = (
    (1, 4093, 198, 1780, 314, 260, 3075, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
    tuple(range(300, 360)),
    tuple(range(1000, 1129)),
)
"""Ids only (a question in the chat template, then nonsense): no tokenizer is needed."""


@pytest.fixture(scope="module")
def target(smollm2_dir: Path) -> Target:
    return load_target(smollm2_dir, torch.bfloat16, num_threads=2)


def run(
    target: Target, drafting: FakeDrafting, kind: PlanKind, num_slots: int = 2048
) -> tuple[dict[str, tuple[int, ...]], Engine]:
    plan = Plan(kind, depth=5, width=4, nodes=15)
    planner = StaticPlanner([SourcePlan(name, plan) for name in drafting.drafters])
    settings = small_settings(page_size=16, num_slots=num_slots, max_prefill_chunk=64)
    engine = Engine(target, drafting, planner, settings)
    client = Client(engine)
    for n, prompt in enumerate(PROMPTS):
        client.submit(request(str(n), prompt, NUM_OUTPUT, ignore_eos=True, **SAMPLING[n]))
        if not drafting.drafters:
            client.finish()
    texts = client.finish()
    engine.check_idle()
    return texts, engine


def test_no_draft_changes_a_text_of_smollm2(target: Target):
    assert target.facts.invariant, target.facts.invariance_note
    truth, _ = run(target, FakeDrafting(), PlanKind.CHAIN)
    futures = {str(n): (*prompt, *truth[str(n)]) for n, prompt in enumerate(PROMPTS)}
    assert all(len(ids) == NUM_OUTPUT for ids in truth.values())
    vocab_size = target.facts.vocab_size
    good, liar = future_source(futures, vocab_size, 0.3), random_source(vocab_size)
    assert run(target, FakeDrafting({"good": good}), PlanKind.CHAIN)[0] == truth
    texts, engine = run(target, FakeDrafting({"good": good, "liar": liar}), PlanKind.TREE)
    assert texts == truth
    assert engine.stats().num_accepted > 24
    texts, engine = run(target, FakeDrafting({"good": good}), PlanKind.TREE, num_slots=256)
    assert texts == truth
    assert engine.stats().num_preemptions > 0

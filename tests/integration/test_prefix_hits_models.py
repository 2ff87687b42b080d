"""Cached KV is what would be computed anew, bit for bit, on real models in float32 and bf16.

Every logit row that decides a token is compared with torch.equal between an engine without a
prefix cache and one that found the beginning of the prompt, whatever pages and chunks are.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest
from tests.fakes import Client, FakeDrafting, random_source, request
from tests.tiny import tiny_llama_dir
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target
from verifier_service.step import Span, Target

VOCAB = 384
PROMPT = [3 + (17 * j + j * j) % (VOCAB - 3) for j in range(131)]
TREE = SourcePlan("x", Plan(PlanKind.TREE, depth=4, width=3, nodes=12))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory: Path = tiny_llama_dir(tmp_path_factory.mktemp("hits"))
    return load_target(directory, getattr(torch, request.param))


class Watched:
    """A target whose plain logit rows are remembered by (request, position of the row)."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        logits = self._target.forward(spans)
        first = 0
        for span in spans:
            if span.parents is None and span.num_logits == 1:
                self.rows[span.key, span.start + span.num_rows - 1] = logits[first].clone()
            first += span.num_logits
        return logits


def run(
    target: Target, asks: Sequence[GenerationRequest], drafts: bool = False, **settings: int
) -> tuple[Client, Watched]:
    """Each request after the one before has ended."""
    watched = Watched(target)
    drafting = FakeDrafting({"x": random_source(VOCAB, 4)} if drafts else {})
    values = {"num_slots": 1024, "max_tokens_per_step": 64} | settings
    planner = StaticPlanner([TREE] if drafts else [])
    client = Client(Engine(watched, drafting, planner, EngineSettings(**values)))
    for ask in asks:
        client.submit(ask)
        client.finish()
    client.engine.check_idle()
    return client, watched


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 23), (64, 64), (16, 7)])
@pytest.mark.parametrize("drafts", [False, True])
def test_logits_behind_a_hit_equal_those_behind_a_miss(
    target: Target, page_size: int, chunk: int, drafts: bool
):
    assert target.facts.invariant, target.facts.invariance_note
    sizes = {"page_size": page_size, "max_prefill_chunk": chunk}
    first = request("first", PROMPT[:100], 30, ignore_eos=True, temperature=0.9, seed=1)
    warm, seen = run(target, [first], drafts, **sizes)
    # The next turn: prompt, answer, something new; and the very same prompt once more.
    turn = [*PROMPT[:100], *warm.ids("first"), *PROMPT[100:]]
    second = request("second", turn, 12, ignore_eos=True, temperature=0.9, seed=2)
    third = request("third", PROMPT[:100], 12, ignore_eos=True)
    warm, seen = run(target, [first, second, third], drafts, **sizes)
    cold, anew = run(target, [first, second, third], False, prefix_cache=False, **sizes)
    counts = warm.last("second").counts
    assert counts is not None
    assert counts.num_cached == 129 // page_size * page_size
    assert warm.texts() == cold.texts()
    assert len(seen.rows) >= 3
    assert all(torch.equal(row, anew.rows[place]) for place, row in seen.rows.items())

"""Every served family through the engine: transformers' own greedy text, whatever is drafted.

Tiny random models in float32. The truth is `generate` on transformers' own attention; prompts and
answers cross windows, pages, chunks and tiles, and requests run side by side. In bf16 and fp16,
where `generate` rounds elsewhere, the truth is the engine's own plain decoding of one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter_service.build import build_drafter
from drafter_service.config import DrafterSettings
from protos.exchange import Plan, PlanKind
from protos.features import FINAL_LAYER, DType
from protos.generation import GenerationRequest
from tests.fakes import (
    Client,
    FakeDrafting,
    RandomPlanner,
    future_source,
    random_source,
    request,
    small_settings,
)
from tests.tiny import write_tiny
from tests.unit.model.family_cases import FAMILIES, VOCAB, WINDOW
from tests.unit.model.stepping import paged
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Drafting, Planner, SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.fuse import FusedDecoder
from verifier_service.model.load import load_target
from verifier_service.model.target import TransformersTarget
from verifier_service.step import TapSpec

NUM_OUTPUT = 24
PROMPT_LENS = (3, WINDOW - 2, 66)
"""Answers cross the window, a tile of 64 positions, and start behind both."""
MARGIN = 1e-3
"""Between the two best logits: more than a hundred times what sums in another order change."""
LAYERS = (0, 1, 2)
SAME_IN_BF16 = {
    "llama": "bit for bit in unit/model/test_step_invariance",
    "qwen3": "bit for bit in unit/model/test_step_invariance",
    "gemma3": "the text model is gemma3_text's",
    "olmo3": "layers of olmo2, windows of gemma2",
    "smollm3": "layers of llama, windows of gemma2; positions are float32 anyway",
    "mixtral": "experts of qwen3_moe, the window of mistral",
}
"""Families of which nothing but their numbers is new in bf16; float32 compares each."""
Texts = dict[str, tuple[int, ...]]


def prompt(n: int, length: int) -> list[int]:
    return [3 + (17 * n + 5 * j + j * j) % (VOCAB - 40) for j in range(length)]


def greedy_requests() -> list[GenerationRequest]:
    return [
        request(f"r{n}", prompt(n, length), NUM_OUTPUT, ignore_eos=True)
        for n, length in enumerate(PROMPT_LENS)
    ]


def sampled_request() -> GenerationRequest:
    options = {"temperature": 0.9, "seed": 5, "top_p": 0.95}
    return request("sampled", prompt(9, 30), NUM_OUTPUT, ignore_eos=True, **options)


@dataclass(frozen=True)
class Case:
    """A family's files, its target in float32, and what `generate` says."""

    name: str
    directory: Path
    model: torch.nn.Module
    target: TransformersTarget
    truth: Texts
    margin: float


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = FAMILIES[request.param]
    directory = write_tiny(family.config(), tmp_path_factory.mktemp(request.param), family.seed)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    taps = [TapSpec("aux", LAYERS), TapSpec("final", (FINAL_LAYER,))]
    target = load_target(directory, torch.float32, taps)
    truth, margins = {}, []
    for one in greedy_requests():
        told = model.generate(
            torch.tensor([one.prompt_ids]),
            max_new_tokens=NUM_OUTPUT,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        truth[one.request_id] = tuple(told.sequences[0, len(one.prompt_ids) :].tolist())
        best = torch.cat(told.logits).topk(2).values
        margins.append(float((best[:, 0] - best[:, 1]).min()))
    return Case(request.param, directory, model, target, truth, min(margins))


def run(
    target: TransformersTarget,
    requests: Sequence[GenerationRequest],
    drafting: Drafting | None = None,
    planner: Planner | None = None,
    together: bool = True,
    **sizes: int,
) -> tuple[Texts, Engine]:
    sizes = {"page_size": 8, "num_slots": 1024, "max_prefill_chunk": 20} | sizes
    engine = Engine(
        target,
        drafting or FakeDrafting(),
        planner or StaticPlanner(),
        small_settings(max_tokens_per_step=160, **sizes),
    )
    client = Client(engine)
    for one in requests:
        client.submit(one)
        if not together:
            client.finish()
    texts = client.finish()
    engine.check_idle()
    return texts, engine


def futures(texts: Texts) -> Texts:
    requests = [*greedy_requests(), sampled_request()]
    return {
        one.request_id: (*one.prompt_ids, *texts[one.request_id])
        for one in requests
        if one.request_id in texts
    }


def planned(name: str, kind: PlanKind) -> StaticPlanner:
    return StaticPlanner([SourcePlan(name, Plan(kind, depth=5, width=3, nodes=16))])


def test_greedy_text_is_what_generate_says(case: Case):
    assert case.margin > MARGIN, "a poor witness: two logits nearly tie"
    for ids in case.truth.values():
        assert len(set(ids)) >= 8, "a poor witness: the text repeats itself"
    assert isinstance(case.target._decoder, FusedDecoder) is FAMILIES[case.name].fused
    texts, _ = run(case.target, greedy_requests())
    assert texts == case.truth


def test_trees_that_are_partly_right_leave_the_text_alone(case: Case):
    drafting = FakeDrafting({"future": future_source(futures(case.truth), VOCAB, 0.3)})
    texts, engine = run(case.target, greedy_requests(), drafting, planned("future", PlanKind.TREE))
    assert texts == case.truth
    assert engine.stats().num_accepted > 25


def test_any_drafts_under_preemption_leave_greedy_and_sampled_text_alone(case: Case):
    assert case.target.facts.invariant, case.target.facts.invariance_note
    sampled, _ = run(case.target, [sampled_request()])
    truth = case.truth | sampled
    assert len(set(truth["sampled"])) >= 8
    drafting = FakeDrafting(
        {"good": future_source(futures(truth), VOCAB, 0.3), "liar": random_source(VOCAB)}
    )
    requests = [*greedy_requests(), sampled_request()]
    texts, engine = run(case.target, requests, drafting, RandomPlanner(1), num_slots=176)
    assert texts == truth
    assert engine.stats().num_accepted > 10
    assert engine.stats().num_preemptions > 0


def test_rows_are_the_hidden_states_of_each_layer(case: Case):
    ids = greedy_requests()[2].prompt_ids
    case.target.allocate(512)
    slots = paged(ids, page=8, high=512)
    for start, end in ((0, 30), (30, len(ids))):
        case.target.forward([slots.span(start, end, 0)])
    with torch.inference_mode():
        states = case.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    # hidden_states[0] is the embedding; the last one is behind the norm already.
    expected = {
        "aux": torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1),
        "final": states[-1][0],
    }
    for key, rows in expected.items():
        data = bytearray(case.target.read_rows(key, slots.slots))
        own = torch.frombuffer(data, dtype=torch.float32).view(rows.shape)
        torch.testing.assert_close(own, rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [n for n in FAMILIES if n not in SAME_IN_BF16], indirect=True)
def test_bf16_serves_each_request_as_if_alone(case: Case):
    target = load_target(case.directory, torch.bfloat16)
    assert_alone_equals_drafted(target)


@pytest.mark.parametrize("case", ["qwen3", "phi3", "gpt_oss"], indirect=True)
def test_fp16_serves_each_request_as_if_alone(case: Case):
    target = load_target(case.directory, torch.float16)
    assert target.facts.dtype is DType.FP16
    assert_alone_equals_drafted(target)


def assert_alone_equals_drafted(target: TransformersTarget) -> None:
    assert target.facts.invariant, target.facts.invariance_note
    requests = greedy_requests()[1:]
    plain, _ = run(target, requests, together=False)
    assert len(set(plain["r2"])) >= 8
    drafting = FakeDrafting({"future": future_source(futures(plain), VOCAB, 0.3)})
    texts, engine = run(target, requests, drafting, planned("future", PlanKind.TREE))
    assert texts == plain
    assert engine.stats().num_accepted > 15


@pytest.mark.parametrize("case", ["gemma3_text", "gpt_oss"], indirect=True)
def test_chains_of_the_ngram_drafter_leave_the_text_alone(case: Case):
    facts, rows = case.target.facts, PagedRows(case.target)
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, {})
    exchange = DraftExchange(end, rows)
    exchange.add_local(build_drafter(DrafterSettings(kind="ngram", name="ngram")), "ngram")
    # The text once more behind itself: look-ups find all of it.
    again = [
        request(one.request_id, [*ids, *one.prompt_ids], NUM_OUTPUT, ignore_eos=True)
        for one, ids in zip(greedy_requests(), futures(case.truth).values(), strict=True)
    ]
    plain, _ = run(case.target, again, together=False)
    drafted, engine = run(case.target, again, exchange, planned("ngram", PlanKind.CHAIN))
    exchange.close()
    assert drafted == plain
    assert engine.stats().num_drafted > 20

"""Block drafters in the engine with a tiny target: perfect ones fill their blocks, any leaves the
text alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from protos.digest import directory_digest
from protos.errors import ConfigError
from protos.exchange import Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from protos.params import Acceptance
from tests.fakes import request, small_settings
from tests.fixtures.make_perfect_blocks import NUM_OUTPUT, PROMPTS
from tests.integration.block_house import BlockHouse
from tests.tiny import tiny_llama_dir
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
KINDS = ("dflash", "dspark")
VOCAB = 384
BLOCK = Plan(PlanKind.BLOCK, depth=7)
PLANS = {
    "block": BLOCK,
    "prefix": Plan(PlanKind.BLOCK, depth=3),
    "chain": Plan(PlanKind.CHAIN, depth=5),
    "tree": Plan(PlanKind.TREE, depth=5, width=3, nodes=14),
    "block tree": Plan(PlanKind.BLOCK, depth=7, width=1, nodes=20),
}
SAMPLING = (
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.1, "seed": -5, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2**63 - 1, "top_k": 8},
    {"temperature": 1.2, "seed": 3, "min_p": 0.05},
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def known_target(target_dir: Path) -> Path:
    """The target whose texts the perfect drafters know."""
    if directory_digest(target_dir) != (FIXTURES / "target_digest.txt").read_text().strip():
        pytest.skip("another torch draws another target: run tests.fixtures.make_perfect_blocks")
    return target_dir


def drafter_of(checkpoint: Path, target_dir: Path, kind: str, dtype: str = "fp32", **limits: int):
    settings = DrafterSettings(
        kind=kind,
        checkpoint=str(checkpoint),
        dtype=dtype,
        limits=DrafterLimits(**({"max_context": 512} | limits)),
    )
    return build_drafter(settings, target_dir)


def perfect_house(target_dir, kind, plan, dtype=torch.float32, fused=True, **limits) -> BlockHouse:
    checkpoint = FIXTURES / f"perfect_{kind}"
    width = "fp32" if dtype is torch.float32 else "bf16"
    drafter = drafter_of(checkpoint, target_dir, kind, width, **limits)
    planner = StaticPlanner([SourcePlan(kind, plan)])
    return BlockHouse(target_dir, [drafter], [checkpoint if fused else None], planner, dtype)


def known_texts():
    return [request(f"p{n}", list(p), NUM_OUTPUT - 8) for n, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_a_perfect_block_of_n_commits_n_plus_one_tokens_a_round(known_target, kind, length):
    house = perfect_house(known_target, kind, Plan(PlanKind.BLOCK, length))
    house.run(known_texts())
    for name in ("p0", "p1", "p2"):
        rounds = house.rounds(name)
        assert set(rounds[:-1]) == {length + 1}
        assert 1 <= rounds[-1] <= length + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_block_stays_perfect_over_raw_rows_and_in_trees(known_target, kind):
    raw = perfect_house(known_target, kind, BLOCK, fused=False)
    raw.run(known_texts())
    assert set(raw.rounds("p1")[:-1]) == {8}
    tree = perfect_house(known_target, kind, PLANS["block tree"])
    tree.run(known_texts())
    assert set(tree.rounds("p1")[:-2]) == {8}


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_blocks_confidences_say_so(known_target, kind):
    house = perfect_house(known_target, kind, BLOCK)
    seen = []
    original = house.exchange.exchange

    def spy(asks, deadline_s):
        answers = original(asks, deadline_s)
        seen.extend(draft for drafts in answers.values() for draft in drafts)
        return answers

    house.exchange.exchange = spy
    house.run(known_texts()[:1])
    assert seen
    sure = [draft.tree.scores[-1] > -0.7 for draft in seen if draft.tree.num_nodes == 7]
    assert all(sure)


class Case:
    """A target in one element type, its requests and their texts without any drafter."""

    def __init__(self, target_dir: Path, dtype: torch.dtype) -> None:
        self.target_dir, self.dtype = target_dir, dtype
        self.requests = [
            request(
                f"r{n}",
                list(PROMPTS[n % 3]) + [9 + n] * (n // 3),
                40,
                ignore_eos=True,
                **SAMPLING[n % len(SAMPLING)],
            )
            for n in range(6)
        ]
        house = BlockHouse(target_dir, [], [], StaticPlanner(), dtype)
        self.truth = house.run(self.requests)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def case(request: pytest.FixtureRequest, target_dir: Path) -> Case:
    return Case(target_dir, request.param)


@pytest.fixture(scope="module")
def float_case(target_dir: Path) -> Case:
    return Case(target_dir, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", PLANS)
def test_same_seed_same_text_for_every_shape(known_target, case, kind, shape):
    house = perfect_house(known_target, kind, PLANS[shape], case.dtype)
    assert house.run(case.requests) == case.truth
    assert house.engine.stats().num_accepted > 20


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_and_a_cache_too_small_leave_the_text_alone(case, kind):
    checkpoint = FIXTURES / f"perfect_{kind}"
    width = "fp32" if case.dtype is torch.float32 else "bf16"
    drafter = drafter_of(checkpoint, case.target_dir, kind, width, cache_mb=1, max_sessions=2)
    planner = StaticPlanner([SourcePlan(kind, BLOCK)])
    sizes = small_settings(page_size=16, num_slots=192, max_prefill_chunk=64)
    house = BlockHouse(case.target_dir, [drafter], [checkpoint], planner, case.dtype, sizes)
    assert house.run(case.requests) == case.truth
    assert house.engine.stats().num_preemptions > 0


def test_a_block_beside_ngram_leaves_the_text_alone(case):
    checkpoint = FIXTURES / "perfect_dspark"
    block = drafter_of(checkpoint, case.target_dir, "dspark", "bf16")
    ngram = build_drafter(DrafterSettings(kind="ngram"))
    plans = [SourcePlan("dspark", PLANS["block tree"]), SourcePlan("ngram", PLANS["chain"])]
    house = BlockHouse(
        case.target_dir, [block, ngram], [checkpoint, None], StaticPlanner(plans), case.dtype
    )
    assert house.run(case.requests) == case.truth


def spoiled(into: Path, target_dir: Path, kind: str, change) -> Path:
    """The perfect drafter with an lm_head of its own, and something done to its weights."""
    directory = into / kind
    shutil.copytree(FIXTURES / f"perfect_{kind}", directory)
    tensors = {
        name: value.to(torch.float32)
        for name, value in load_file(directory / "model.safetensors").items()
    }
    target = load_file(target_dir / "model.safetensors")
    tensors["lm_head.weight"] = target["lm_head.weight"].clone()
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def always_end(tensors):
    """Proposes the end of sequence everywhere."""
    tensors["norm.weight"] = torch.ones_like(tensors["norm.weight"])
    head = torch.zeros_like(tensors["lm_head.weight"])
    tensors["lm_head.weight"] = head
    tensors["lm_head.weight"][2] = tensors["norm.weight"].sign()
    tensors["hidden_norm.weight"] *= 0.0


def no_number(tensors):
    tensors["layers.1.mlp.down_proj.weight"][5, 7] = float("nan")


def infinite_projection(tensors):
    tensors["hidden_norm.weight"][3] = float("inf")


def noise(tensors):
    generator = torch.Generator().manual_seed(3)
    for name, value in tensors.items():
        tensors[name] = value + 0.15 * torch.randn(value.shape, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [always_end, no_number, infinite_projection, noise])
def test_hostile_and_broken_weights_leave_the_text_alone(float_case, tmp_path, kind, change):
    checkpoint = spoiled(tmp_path, float_case.target_dir, kind, change)
    drafter = drafter_of(checkpoint, float_case.target_dir, kind)
    planner = StaticPlanner([SourcePlan(kind, PLANS["block tree"])])
    # Weights that are not finite are no projection for a verifier: raw rows then.
    house = BlockHouse(float_case.target_dir, [drafter], [None], planner, float_case.dtype)
    assert house.run(float_case.requests) == float_case.truth
    if change in (no_number, infinite_projection):
        assert house.engine.stats().num_drafted == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_asks_for_its_own_block_length_and_gets_no_more_than_trained(known_target, kind):
    house = perfect_house(known_target, kind, Plan())
    for length, expected in ((3, 4), (64, 8)):
        plan = Plan(PlanKind.BLOCK, length)
        fixed = Speculation(mode=SpeculationMode.FIXED, drafters=(kind,), plan=plan)
        name = f"asked{length}"
        house.run([request(name, list(PROMPTS[1]), NUM_OUTPUT - 8, speculation=fixed)])
        assert set(house.rounds(name)[:-1]) == {expected}


@pytest.mark.parametrize("kind", KINDS)
def test_rejection_takes_chains_with_their_q(target_dir, kind):
    house = perfect_house(target_dir, kind, BLOCK)
    asked = request(
        "r", list(PROMPTS[1]), 40, temperature=0.7, seed=4, acceptance=Acceptance.REJECTION
    )
    text = house.run([asked])["r"]
    assert 0 < len(text) <= 40
    assert house.engine.stats().num_drafted > 0


def test_a_checkpoint_of_the_other_kind_is_refused(target_dir):
    with pytest.raises(ConfigError, match="kind dflash, not dspark"):
        drafter_of(FIXTURES / "perfect_dflash", target_dir, "dspark")


def test_fixtures_are_small_and_made_for_this_target(target_dir):
    for kind in KINDS:
        directory = FIXTURES / f"perfect_{kind}"
        assert sum(path.stat().st_size for path in directory.iterdir()) < 300_000
        config = json.loads((directory / "config.json").read_text())
        assert config["vocab_size"] == VOCAB
        capabilities = drafter_of(directory, target_dir, kind).capabilities
        assert capabilities.max_depth == 7

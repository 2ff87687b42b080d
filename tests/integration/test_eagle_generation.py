"""EAGLE heads in the engine: the public loop replayed, perfect heads, and texts that stay put."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from protos.digest import directory_digest
from protos.exchange import Plan, PlanKind
from tests.fakes import Client, FakeDrafting, request, small_settings
from tests.integration.block_house import BlockHouse
from tests.perfect_heads.overfit import HERE, NUM_OUTPUT, NUM_STEPS, PROMPTS, target_dir
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target

LIMITS = DrafterLimits(max_context=512)
STATIC = Plan(PlanKind.STATIC, depth=5, nodes=25)
TREE = Plan(PlanKind.TREE, depth=4, width=4, nodes=15)
PERFECT = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3"}


def house_of(target, checkpoint, kind, plan, fused=True, **more):
    settings = DrafterSettings(
        kind=kind, name="head", checkpoint=str(checkpoint), dtype="fp32", limits=LIMITS
    )
    drafter = build_drafter(settings, target)
    planner = StaticPlanner([SourcePlan("head", plan)], deadline_s=5.0)
    return BlockHouse(target, [drafter], [checkpoint if fused else None], planner, **more)


@pytest.fixture(scope="module")
def public(golden_dir, tmp_path_factory):
    """(target, head, tensors) of the public end-to-end run, as directories."""
    source = golden_dir / "eagle" / "e2e_safeailab"
    target = tmp_path_factory.mktemp("target")
    shutil.copyfile(source / "target_config.json", target / "config.json")
    save_file(
        load_file(source / "target.safetensors"), target / "model.safetensors", {"format": "pt"}
    )
    return target, source, load_file(source / "io.safetensors")


@pytest.mark.parametrize("shape", [(16, 3, 4), (60, 5, 10)], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "raw"])
def test_trees_commit_what_the_public_loop_commits(public, shape, fused):
    target, head, io = public
    total, depth, width = shape
    plan = Plan(PlanKind.TREE, depth=depth + 1, width=width, nodes=total - 1)
    house = house_of(target, head, "eagle3", plan, fused)
    for number in range(3):
        name = f"prompt{number}"
        ids, greedy = io[f"{name}.input_ids"].tolist(), io[f"{name}.greedy_48"].tolist()
        asked = request(name, ids, len(greedy), ignore_eos=True)
        assert list(house.run([asked])[name]) == greedy
        accepted = io[f"{name}.tree_{total}_{depth}_{width}.accepted_per_round"].tolist()
        ours = house.rounds(name)
        # The last rounds are cut at the end of the text, the public ones run on.
        compared = min(len(ours), len(accepted)) - 2
        assert ours[:compared] == [count + 1 for count in accepted[:compared]]
        assert sum(accepted[:compared]) > 0


@pytest.fixture(scope="module")
def known_target(tmp_path_factory):
    """The target whose texts the perfect heads know."""
    directory = target_dir(tmp_path_factory.mktemp("known"))
    if directory_digest(directory) != (HERE / "target_digest.txt").read_text().strip():
        pytest.skip("another torch draws another target: run tests.perfect_heads.overfit")
    return directory


@pytest.mark.parametrize("name", PERFECT)
@pytest.mark.parametrize("depth", [1, 3, NUM_STEPS])
def test_a_perfect_head_is_accepted_whole(known_target, name, depth):
    plan = Plan(PlanKind.CHAIN, depth=depth)
    house = house_of(known_target, HERE / name, PERFECT[name], plan, fused=name != "eagle")
    asked = [
        request(str(n), prompt, NUM_OUTPUT, ignore_eos=True) for n, prompt in enumerate(PROMPTS)
    ]
    house.run(asked)
    for one in asked:
        first, *others = house.rounds(one.request_id)
        *middle, _ = [first, *others]
        assert set(middle) == {depth + 1}, f"{one.request_id}: {middle}"


@pytest.mark.parametrize("name", PERFECT)
@pytest.mark.parametrize("plan", [TREE, STATIC], ids=["tree", "static"])
def test_a_perfect_head_is_accepted_to_the_depth_of_its_tree(known_target, name, plan):
    house = house_of(known_target, HERE / name, PERFECT[name], plan, fused=name != "eagle")
    house.run([request("r", PROMPTS[0], NUM_OUTPUT, ignore_eos=True)])
    *rounds, _ = house.rounds("r")
    assert max(rounds) == plan.depth + 1
    assert sum(rounds) >= 0.8 * (plan.depth + 1) * len(rounds)


SAMPLING = (
    {},
    {"temperature": 0.3, "seed": 1},
    {"temperature": 1.1, "seed": -5, "top_p": 0.9},
    {"temperature": 0.9, "seed": 2**63 - 1, "top_k": 8},
)


def some_requests():
    return [
        request(f"r{n}", PROMPTS[n % 3], 40, ignore_eos=True, **sampling)
        for n, sampling in enumerate(SAMPLING)
    ]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def truth(request, known_target):
    """The texts of requests that run alone and without drafts."""
    target = load_target(known_target, request.param)
    sizes = small_settings(page_size=16, num_slots=4096, max_prefill_chunk=64)
    client = Client(Engine(target, FakeDrafting(), StaticPlanner(), sizes))
    for one in some_requests():
        client.submit(one)
        client.finish()
    return request.param, client.texts()


@pytest.mark.parametrize("name", PERFECT)
@pytest.mark.parametrize(
    "plan", [Plan(PlanKind.CHAIN, depth=4), TREE, STATIC], ids=lambda p: p.kind
)
def test_same_seed_same_text_whatever_a_head_drafts(known_target, truth, name, plan):
    dtype, texts = truth
    house = house_of(known_target, HERE / name, PERFECT[name], plan, name == "eagle3", dtype=dtype)
    assert house.run(some_requests()) == texts
    # The heads know the float32 texts: in bf16 they lose their thread after some tokens.
    assert house.engine.stats().num_accepted > (10 if dtype is torch.float32 else 3)


def test_a_hostile_head_changes_no_text(known_target, truth, tmp_path):
    """Weights of noise, and weights that are not finite."""
    dtype, texts = truth
    for value in (None, float("nan"), 1e30):
        copy = tmp_path / str(value)
        shutil.copytree(HERE / "eagle3", copy)
        tensors = load_file(copy / "model.safetensors")
        fc = tensors["fc.weight"]
        noise = torch.randn(fc.shape, generator=torch.Generator().manual_seed(0)).to(fc.dtype)
        tensors["fc.weight"] = noise if value is None else torch.full_like(fc, value)
        save_file(tensors, copy / "model.safetensors")
        house = house_of(known_target, copy, "eagle3", TREE, dtype=dtype)
        assert house.run(some_requests()) == texts

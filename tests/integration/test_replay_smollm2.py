"""The shipped head on the embedded target: replayed, it counts what a live run counts."""

import pytest
import torch

from cluster.http.text import load_text
from cluster.tools.evaluate_heads import build_head, build_ngram, find_heads
from protos.digest import directory_digest
from protos.features import DType
from tests.fakes import small_settings
from tests.integration.block_house import BlockHouse
from tests.integration.replay_house import CHAIN4, TREE, live, replayed
from verifier_service.data.recorded import RecordSettings, TextRecorder
from verifier_service.data.recording_engine import RecordingTarget
from verifier_service.engine.static_planner import StaticPlanner

QUESTIONS = ("Name the three primary colors.", "Translate into French: The house is red.")
SHAPES = {"chain4": CHAIN4, "merged": TREE}
WINDOW, LONGEST = 4, 256
SIZES = small_settings(page_size=64, num_slots=2048, max_tokens_per_step=512, max_prefill_chunk=256)


def drafters(target):
    """The look-up and the shipped head."""
    (head,) = find_heads(["smollm2-135m-eagle3"], target)
    built = build_head(head, "", target, "bf16", WINDOW, LONGEST)
    return build_ngram(WINDOW, LONGEST), built


@pytest.fixture(scope="module")
def texts(smollm2_dir, tmp_path_factory):
    """What the target says to two questions, by temperature."""
    text = load_text(smollm2_dir)
    prompts = [text.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    (head,) = find_heads(["smollm2-135m-eagle3"], smollm2_dir)
    target = RecordingTarget(smollm2_dir, DType.BF16, batch=2)
    digest, cache = directory_digest(smollm2_dir), tmp_path_factory.mktemp("cache")
    found = {}
    for temperature in (0.0, 1.0):
        settings = RecordSettings(digest, DType.BF16, temperature, max_new=16)
        recorder = TextRecorder(cache, settings)
        found[temperature] = recorder.texts(prompts, sorted(head.layers), target.engine)
    return found


@pytest.fixture(scope="module")
def house(smollm2_dir):
    """The engine with both drafters in its process."""
    both = drafters(smollm2_dir)
    planner = StaticPlanner(deadline_s=30.0)
    return BlockHouse(smollm2_dir, both, [None, None], planner, torch.bfloat16, SIZES)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_shipped_head_counts_as_live(smollm2_dir, house, texts, shape, temperature):
    ngram, head = drafters(smollm2_dir)
    used = [ngram, head] if shape == "merged" else [head]
    names = [drafter.capabilities.name for drafter in used]
    said = texts[temperature]
    expected = live(house, said, names, SHAPES[shape])
    assert replayed(said, used, SHAPES[shape]) == expected
    assert sum(one["accepted"] for one in expected) > 0

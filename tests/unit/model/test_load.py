"""Loading says what a target is, and refuses by name what it cannot serve exactly."""

import json
import shutil

import pytest
import torch

from protos.errors import CheckpointError, ConfigError
from protos.features import DType
from tests.tiny import EOS_ID, tiny_llama_dir
from verifier_service.model.load import load_target
from verifier_service.model.numerics import code_digest
from verifier_service.model.target import TransformersTarget
from verifier_service.step import Span, TapSpec, Target


@pytest.fixture
def copy(tiny_dirs, tmp_path):
    """A copy of the tiny Llama whose JSON files a test may edit."""
    path = tmp_path / "copy"
    shutil.copytree(tiny_dirs["llama"], path)

    def edit(name: str, **changes: object):
        file = path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return path

    return edit


def test_facts_describe_the_checkpoint(tiny_target):
    target: Target = tiny_target("llama", torch.bfloat16)
    facts = target.facts
    assert isinstance(target, TransformersTarget)
    assert (facts.vocab_size, facts.hidden_size, facts.num_layers) == (384, 64, 3)
    assert facts.max_context == 2048
    assert facts.dtype is DType.BF16
    assert facts.bytes_per_slot == 2 * 3 * 2 * 2 * 16
    assert facts.invariant
    assert facts.eos_token_ids == (EOS_ID,)
    assert len(facts.digest) == 32


def test_end_ids_are_the_union_of_config_generation_config_and_tokenizer(copy):
    copy("config.json", eos_token_id=[5, 9])
    path = copy("generation_config.json", eos_token_id=11)
    assert load_target(path, torch.float32).facts.eos_token_ids == (EOS_ID, 5, 9, 11)


def test_a_target_may_have_no_end_id(copy):
    copy("config.json", eos_token_id=None)
    path = copy("generation_config.json", eos_token_id=None)
    for file in path.glob("token*"):
        file.unlink()
    assert load_target(path, torch.float32).facts.eos_token_ids == ()


def test_digest_follows_weights_and_config_and_not_the_place(copy, tiny_dirs, tmp_path):
    same = load_target(copy("generation_config.json"), torch.float32).facts
    assert same.digest == load_target(tiny_dirs["llama"], torch.float32).facts.digest
    other = load_target(tiny_llama_dir(tmp_path / "other", seed=1), torch.float32).facts
    assert other.digest != same.digest
    assert load_target(copy("config.json", pad_token_id=1), torch.float32).facts.digest not in (
        same.digest,
        other.digest,
    )


def test_fingerprint_tells_dtypes_and_fusion_apart(tiny_target):
    found = {
        tiny_target("llama", dtype, fuse).facts.fingerprint
        for dtype in (torch.float32, torch.bfloat16)
        for fuse in (True, False)
    }
    assert len(found) == 4


def test_fingerprint_tells_other_arithmetic_code_apart(tmp_path):
    for room in ("model", "sampling"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "sums.py").write_text("a + b\n")
    before = code_digest(tmp_path)
    assert code_digest(tmp_path) == before
    (tmp_path / "model" / "sums.py").write_text("b + a\n")
    assert code_digest(tmp_path) != before


@pytest.mark.parametrize("length", [0, 2049])
def test_a_context_the_model_does_not_have_is_refused(tiny_dirs, length):
    with pytest.raises(ConfigError, match="2048"):
        load_target(tiny_dirs["llama"], torch.float32, max_context=length)


def test_an_element_type_that_is_not_computed_in_is_refused(tiny_dirs):
    with pytest.raises(ConfigError, match="float64"):
        load_target(tiny_dirs["llama"], torch.float64)


def test_a_float16_target_keeps_float16_rows(tiny_dirs):
    target = load_target(tiny_dirs["llama"], torch.float16, [TapSpec("t", (0,))])
    target.allocate(128)
    target.forward([Span(1, (5, 6), 0, torch.tensor([1, 2]))])
    assert target.row_dtype("t") is target.facts.dtype is DType.FP16
    assert len(target.read_rows("t", torch.tensor([1, 2]))) == 2 * 64 * 2


def test_dynamic_rope_is_refused_by_name(copy):
    path = copy(
        "config.json",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )
    with pytest.raises(CheckpointError, match="dynamic"):
        load_target(path, torch.float32)


def test_longrope_is_served_up_to_its_original_length_only(copy):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    path = copy(
        "config.json",
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 256,
            **factors,
        },
    )
    with pytest.raises(CheckpointError, match="longrope"):
        load_target(path, torch.float32)
    assert load_target(path, torch.float32, max_context=256).facts.max_context == 256


def test_pickled_weights_are_refused(copy):
    path = copy("config.json")
    weights = path / "model.safetensors"
    weights.rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        load_target(path, torch.float32)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_target(tmp_path, torch.float32)


def test_a_pool_that_no_memory_holds_is_refused_with_its_size(tiny_dirs):
    target = load_target(tiny_dirs["llama"], torch.float32)
    with pytest.raises(ConfigError, match=r"1099511627776 token places of KV: 805306368 MiB"):
        target.allocate(2**40)

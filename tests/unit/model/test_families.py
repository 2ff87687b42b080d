"""What is served is listed; everything else is refused by name, before its weights are read."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    CLIPVisionConfig,
    DeepseekV3Config,
    JambaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from protos.errors import CheckpointError, ConfigError
from tests.tiny import write_tiny
from tests.unit.model.family_cases import FAMILIES, VOCAB
from tests.unit.model.stepping import contiguous
from verifier_service.model.decoder import ModulesDecoder
from verifier_service.model.families import SERVED
from verifier_service.model.fuse import FusedDecoder
from verifier_service.model.load import load_target


def edit(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_every_served_family_is_under_test_and_no_other():
    assert sorted(FAMILIES) == list(SERVED)
    for name, family in FAMILIES.items():
        assert family.config().model_type == name


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].fused])
def test_a_family_that_is_fused_gives_what_its_modules_give(name, tmp_path):
    path = write_tiny(FAMILIES[name].config(), tmp_path, FAMILIES[name].seed)
    span = contiguous(range(3, 103)).span(0, 100)
    logits = []
    for fuse in (True, False):
        target = load_target(path, torch.float32, fuse=fuse)
        assert isinstance(target._decoder, FusedDecoder) is fuse
        target.allocate(256)
        logits.append(target.forward([span]))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].fused])
def test_every_matrix_of_a_family_is_measured(name, tmp_path):
    path = write_tiny(FAMILIES[name].config(), tmp_path, FAMILIES[name].seed)
    decoder = load_target(path, torch.float32, fuse=False)._decoder
    assert isinstance(decoder, ModulesDecoder)
    measured = {(m.num_outputs, m.num_inputs) for m in decoder.matrices()}
    unmeasured = [
        parameter.shape
        for module_name, parameter in decoder._text.named_parameters()
        if parameter.dim() == 2 and "embed" not in module_name and "wte" not in module_name
        if "wpe" not in module_name
        if not measured & {tuple(parameter.shape), tuple(parameter.shape[::-1])}
    ]
    assert not unmeasured


def test_longrope_gives_transformers_logits_within_its_original_length(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [4.0, 4.0, 4.0],
    }
    config = FAMILIES["phi3"].config()
    config.rope_parameters = rope
    config.original_max_position_embeddings = 128
    path = write_tiny(config, tmp_path, seed=0)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    ids = range(3, 103)
    with torch.inference_mode():
        expected = model(torch.tensor([list(ids)])).logits[0]
    target = load_target(path, torch.float32, max_context=128)
    target.allocate(256)
    found = torch.cat(
        [target.forward([contiguous(ids).span(a, b)]) for a, b in ((0, 60), (60, 100))]
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=VOCAB),
        MambaConfig(vocab_size=VOCAB),
        JambaConfig(vocab_size=VOCAB),
        Qwen3NextConfig(vocab_size=VOCAB),
        DeepseekV3Config(vocab_size=VOCAB),
        T5Config(vocab_size=VOCAB),
        BartConfig(vocab_size=VOCAB),
        CLIPVisionConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_family_that_is_not_served_is_refused_by_name(config: PreTrainedConfig, tmp_path):
    config.save_pretrained(tmp_path)
    words = f"model_type '{config.model_type}'.*families that are served: gemma2, .*smollm3"
    with pytest.raises(CheckpointError, match=words):
        load_target(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "brand_new"}', "brand_new"),
        ('{"model_type": ["llama"]}', "llama"),
        ("{}", "config.json states no model_type"),
        ("{", "config.json cannot be read"),
        ("[]", "config.json is not an object"),
    ],
)
def test_a_config_that_says_nothing_is_refused(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        load_target(tmp_path, torch.float32)


def test_a_value_of_a_wrong_type_is_named(tmp_path):
    path = write_tiny(FAMILIES["llama"].config(), tmp_path, seed=0)
    edit(path, num_hidden_layers="many")
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        load_target(path, torch.float32)


def test_quantised_weights_are_refused_with_their_method(tmp_path):
    FAMILIES["llama"].config().save_pretrained(tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match="gptq"):
        load_target(tmp_path, torch.float32)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma3_text"])
def test_fp16_is_refused_where_it_overflows(name, tmp_path):
    FAMILIES[name].config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"fp16.*{name}"):
        load_target(tmp_path, torch.float16)

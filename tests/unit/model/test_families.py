"""What other families ask of attention is honoured, or the family is refused by name."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)

from protos.errors import CheckpointError
from tests.tiny import write_tiny
from tests.unit.model.stepping import paged
from verifier_service.model.fuse import FusedDecoder
from verifier_service.model.load import load_target

VOCAB = 200
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES = {
    "soft-cap and alternating windows": Gemma2Config(
        **SIZES,
        head_dim=32,
        sliding_window=40,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=6.0,
    ),
    "sinks and windows": GptOssConfig(
        **SIZES,
        head_dim=32,
        sliding_window=40,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "window everywhere": MistralConfig(**SIZES, sliding_window=40),
    "biases and some windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=40, max_window_layers=2
    ),
    "its own fused matrices": Phi3Config(**SIZES),
    "learned positions": GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=256
    ),
}


@pytest.mark.parametrize("what", FAMILIES)
def test_logits_equal_transformers_own_in_float32(what, tmp_path):
    config = FAMILIES[what]
    path = write_tiny(config, tmp_path, seed=0)
    ids = torch.randint(VOCAB, (1, 150), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(ids).logits[0]
    target = load_target(path, torch.float32)
    target.allocate(1024)
    request = paged(ids[0].tolist(), page=16, high=1024)
    logits = torch.cat([target.forward([request.span(a, b)]) for a, b in ((0, 90), (90, 150))])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert target.facts.invariant is (config.model_type != "gpt_oss")


def test_a_mixture_of_experts_says_that_it_is_not_invariant(tmp_path):
    path = write_tiny(FAMILIES["sinks and windows"], tmp_path, seed=0)
    facts = load_target(path, torch.bfloat16).facts
    assert not facts.invariant
    assert "experts" in facts.invariance_note


def test_only_families_of_the_llama_shape_are_fused(tmp_path):
    for what, fused in (("biases and some windows", True), ("its own fused matrices", False)):
        target = load_target(write_tiny(FAMILIES[what], tmp_path / what, seed=0), torch.float32)
        assert isinstance(target._decoder, FusedDecoder) is fused


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4), "bloom"),
        (MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), "mamba"),
    ],
    ids=["alibi", "no attention"],
)
def test_a_family_that_cannot_be_served_is_refused_by_name(config, words, tmp_path):
    path = write_tiny(config, tmp_path, seed=0)
    with pytest.raises(CheckpointError, match=f"(?i){words}"):
        load_target(path, torch.float32)

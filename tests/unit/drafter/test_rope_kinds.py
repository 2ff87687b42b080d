"""Rotary kinds against transformers' own, from both layouts of a config, written and read back."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafter_service.checkpoint.rope_config import read_rope, rope_parameters
from drafter_service.eagle3.rope import inverse_frequencies, rotary_factors
from protos.errors import CheckpointError

HEAD_DIM, ORIGINAL = 16, 64
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "yarn mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.1 * n for n in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + n for n in range(HEAD_DIM // 2)],
    },
}


def theirs(name, theta, length):
    """(cos, sin) of the last of `length` positions, as transformers computes it."""
    words = {"rope_type": name.split()[0], "rope_theta": theta} | KINDS[name]
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=ORIGINAL,
        rope_parameters=words,
    )
    if name == "default":
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[length - 1]]))
        return cos[0], sin[0]
    inv_freq, scale = ROPE_INIT_FUNCTIONS[words["rope_type"]](config, None, seq_len=length)
    angles = ((length - 1) * inv_freq).repeat(2)[None]
    return angles.cos() * scale, angles.sin() * scale


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("length", [1, 40, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL])
def test_factors_are_transformers_own_below_and_beyond_the_original_length(name, layout, length):
    theta, kind = 50000.0, name.split()[0]
    words = {"rope_type": kind} | KINDS[name]
    if layout == "rope_parameters":
        layer = {layout: words | {"rope_theta": theta}}
    else:
        layer = {layout: words, "rope_theta": theta}
    rope = read_rope(layer | {"max_position_embeddings": ORIGINAL})
    inv_freq = inverse_frequencies(rope, HEAD_DIM)
    ours = rotary_factors(rope, inv_freq, torch.tensor([length - 1]), torch.float32)
    for got, expected in zip(ours, theirs(name, theta, length), strict=True):
        torch.testing.assert_close(got[0], expected, atol=2e-5, rtol=0)
    assert read_rope({layout: rope_parameters(rope), "max_position_embeddings": ORIGINAL}) == rope


def test_a_rows_rotation_does_not_depend_on_its_neighbours():
    for name in ("dynamic", "longrope"):
        layer = {"rope_parameters": {"rope_type": name} | KINDS[name]}
        rope = read_rope(layer | {"max_position_embeddings": ORIGINAL})
        inv_freq = inverse_frequencies(rope, HEAD_DIM)
        alone = rotary_factors(rope, inv_freq, torch.tensor([5]), torch.float32)
        among = rotary_factors(rope, inv_freq, torch.tensor([5, 300]), torch.float32)
        assert torch.equal(alone[0][0], among[0][0])


def test_the_older_words_are_understood_and_unknown_kinds_refused():
    assert read_rope({"rope_scaling": {"type": "linear", "factor": 2.0}}).kind == "linear"
    assert read_rope({}).theta == 10000.0
    assert read_rope({"rope_scaling": None, "rope_theta": 5e5}).theta == 5e5
    # The original EAGLE code scales from a base of 10000, whatever the file says.
    scaled = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}
    assert read_rope(scaled, scaled_theta=10000.0).theta == 10000.0
    with pytest.raises(CheckpointError, match="alibi"):
        read_rope({"rope_scaling": {"type": "alibi"}})
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read_rope({"partial_rotary_factor": 0.5})

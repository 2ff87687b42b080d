"""A tiny random model of every family that is served, small enough to run through `generate`.

Every mechanism of a family is there and within reach of short prompts: windows that prompts and
answers cross, layer types that alternate, rotary scaling beyond the original length, caps, sinks,
experts, layers without positions. Sizes of heads are not hidden size over heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB = 320
WINDOW = 24
"""Positions that a row of a sliding-window layer sees."""
SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    # Tied random weights make every token its own best successor.
    "tie_word_embeddings": False,
}
_OWN_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """One family: what of it is under test, and whether its layers run fused."""

    what: str
    config: Callable[[], PreTrainedConfig]
    fused: bool = False
    seed: int = 0


def _gemma3_text() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
        },
    )


def _gemma3_whole() -> Gemma3Config:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    return Gemma3Config(
        text_config=_gemma3_text().to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=300,
        eoi_token_index=301,
        image_token_index=302,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama3 rope scaling",
        lambda: LlamaConfig(**SIZES, rope_parameters=_LLAMA3_ROPE),
        fused=True,
    ),
    "mistral": Family(
        "a window in every layer", lambda: MistralConfig(**SIZES, sliding_window=WINDOW), fused=True
    ),
    "qwen2": Family(
        "biases, windows in the upper layers, yarn",
        lambda: Qwen2Config(
            **_OWN_HEAD_DIM,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
            rope_parameters=_YARN_ROPE,
        ),
        fused=True,
    ),
    "qwen3": Family(
        "norms of queries and keys",
        lambda: Qwen3Config(
            **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
        ),
        fused=True,
    ),
    "gemma2": Family(
        "caps of scores and logits, alternating windows, scaled embeddings",
        lambda: Gemma2Config(
            **SIZES,
            sliding_window=WINDOW,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=12.0,
        ),
    ),
    "gemma3_text": Family(
        "two rotations, norms of queries and keys",
        _gemma3_text,
        seed=1,
    ),
    "gemma3": Family("the text of a model with a vision tower of as many layers", _gemma3_whole),
    "phi3": Family(
        "its own joined matrices, a window, part of the head rotated",
        lambda: Phi3Config(
            **_OWN_HEAD_DIM,
            sliding_window=WINDOW,
            rope_parameters=_PLAIN_ROPE | {"partial_rotary_factor": 0.5},
        ),
    ),
    "olmo2": Family(
        "norms behind attention and mlp, over all heads at once",
        lambda: Olmo2Config(**_OWN_HEAD_DIM, rope_parameters=_PLAIN_ROPE),
        seed=2,
    ),
    "olmo3": Family(
        "the same with windows and yarn",
        lambda: Olmo3Config(
            **_OWN_HEAD_DIM,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            rope_parameters=_YARN_ROPE,
        ),
        seed=2,
    ),
    "smollm3": Family(
        "layers without positions",
        lambda: SmolLM3Config(
            **_OWN_HEAD_DIM,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
        ),
        seed=2,
    ),
    "qwen3_moe": Family(
        "experts in all layers but one, weights of the chosen made to sum to one",
        lambda: Qwen3MoeConfig(
            **SIZES,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
        seed=2,
    ),
    "mixtral": Family(
        "experts everywhere, a window",
        lambda: MixtralConfig(
            **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
        ),
    ),
    "gpt_oss": Family(
        "sinks, alternating windows, experts with biases, yarn",
        lambda: GptOssConfig(
            **SIZES,
            sliding_window=WINDOW,
            layer_types=_ALTERNATING,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=_YARN_ROPE,
        ),
    ),
    "gpt2": Family(
        "learned positions",
        lambda: GPT2Config(
            vocab_size=VOCAB,
            n_embd=48,
            n_layer=4,
            n_head=4,
            n_positions=256,
            bos_token_id=0,
            eos_token_id=2,
            tie_word_embeddings=False,
        ),
        seed=1,
    ),
}

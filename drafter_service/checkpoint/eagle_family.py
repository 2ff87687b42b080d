"""The EAGLE-1 family: which checkpoints belong to it, and what they say. Torch-free.

No key says "EAGLE": a plain one-layer Llama config beside an fc of twice the width. The first
layer has no input norm, the head no final one; embedding and lm_head are the target's where the
file has none. Sources: `reference/eagle.md` 2. Invariant: unknown tensors are refused by name.
"""

from collections.abc import Mapping

from drafter_service.checkpoint.description import (
    CheckpointDescription,
    CheckpointFiles,
    Family,
    Json,
)
from drafter_service.checkpoint.eagle3_names import Shape, layer_names, layer_shapes, match_names
from drafter_service.checkpoint.rope_config import DEFAULT_THETA, read_rope
from drafter_service.checkpoint.safetensors_header import checkpoint_digest
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle3.config import LayerFacts
from protos.errors import CheckpointError
from protos.features import FINAL_LAYER

KIND = "eagle"
BORROWED = ("embed_tokens.weight", "lm_head.weight")
"""Taken from the target where a file has none."""
_OTHERS = ("speculators_model_type", "draft_vocab_size", "block_size", "dflash_config")


def recognise_eagle(files: CheckpointFiles) -> bool:
    """By what it has and, more than that, by what it lacks."""
    names = files.bare_names
    return (
        not any(key in files.config for key in _OTHERS)
        and "fc.weight" in names
        and "layers.0.self_attn.q_proj.weight" in names
        and not any("hidden_norm" in name or "d2t" in name for name in names)
    )


def describe_eagle(files: CheckpointFiles) -> CheckpointDescription[EagleConfig]:
    """Raises CheckpointError, naming what is missing, unknown or of the wrong shape."""
    config = read_eagle_config(files.config, files.bare_names)
    names = match_names("EAGLE-1", *names_and_shapes(config), files.tensors, BORROWED)
    return CheckpointDescription(
        kind=KIND,
        format="safeailab",
        digest=checkpoint_digest(files.directory),
        config=config,
        names=names,
        tensors=files.tensors,
        projection=None,
        aux_layers=(FINAL_LAYER,),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        own_embedding="embed_tokens.weight" in names,
        own_lm_head="lm_head.weight" in names,
    )


EAGLE = Family("EAGLE-1", recognise_eagle, describe_eagle)


def read_eagle_config(config: Json, names: Mapping[str, str]) -> EagleConfig:
    """Biases are there where the file has them; `bias` in the config is about fc, absent or not.

    Raises CheckpointError, KeyError, TypeError or ValueError.
    """
    refused = {
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        f"model_type {config.get('model_type')!r}": config.get("model_type", "llama")
        not in ("llama", "qwen2"),
        "quantization_config": bool(config.get("quantization_config")),
        "bias: true and no fc.bias": config.get("bias") is True and "fc.bias" not in names,
        "bias: false and an fc.bias": config.get("bias") is False and "fc.bias" in names,
        "sliding-window attention": bool(config.get("use_sliding_window")),
    }
    for name, found in refused.items():
        if found:
            raise CheckpointError(f"EAGLE-1 head with {name} is not supported")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    attention = "layers.0.self_attn."
    layer = LayerFacts(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate_size=int(config["intermediate_size"]),
        norm_eps=float(config["rms_norm_eps"]),
        attention_bias=f"{attention}o_proj.bias" in names or bool(config.get("attention_bias")),
        qkv_bias=f"{attention}q_proj.bias" in names or bool(config.get("qkv_bias")),
        mlp_bias="layers.0.mlp.gate_proj.bias" in names or bool(config.get("mlp_bias")),
    )
    return EagleConfig(
        layer=layer,
        rope=read_rope(config, scaled_theta=DEFAULT_THETA),
        vocab_size=int(config["vocab_size"]),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        num_layers=int(config.get("num_hidden_layers", 1)),
        fc_bias="fc.bias" in names,
    )


def names_and_shapes(config: EagleConfig) -> tuple[dict[str, str], dict[str, Shape]]:
    """({parameter of EagleHead: public name}, {parameter: shape})."""
    c = config.hidden_size
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab_size, c),
        "lm_head.weight": (config.vocab_size, c),
        "fc.weight": (c, 2 * c),
    }
    if config.fc_bias:
        shapes["fc.bias"] = (c,)
    names = {name: name for name in shapes}
    for number in range(config.num_layers):
        of_layer = layer_shapes(config.layer, input_norm=number > 0)
        place = "layer." if number == 0 else f"later.{number - 1}."
        shapes |= {f"{place}{ours}": shape for ours, shape in of_layer.items()}
        names |= {
            f"{place}{ours}": f"layers.{number}.{public}"
            for ours, public in layer_names(of_layer).items()
        }
    return names, shapes

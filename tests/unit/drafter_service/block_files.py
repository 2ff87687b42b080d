"""Tiny block drafters written as checkpoints in every public format."""

import json
from pathlib import Path

from block_cases import BLOCK, HIDDEN, VOCAB
from safetensors.torch import save_file

from drafter_service.checkpoint.block_names import parameter_shapes
from drafter_service.checkpoint.writer import vocabulary_maps
from drafter_service.dflash.net import BlockNet


def layers_of(net: BlockNet) -> dict:
    """The decoder layers in transformers' words."""
    config = net.config
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "attention_bias": config.attention_bias,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * config.num_layers,
    }


def zlab(net: BlockNet) -> dict:
    block = {"mask_token_id": net.config.mask_id, "target_layer_ids": list(net.config.aux_layers)}
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "num_target_layers": 7,
        **layers_of(net),
        "dflash_config": block,
    }


def zlab2(net: BlockNet) -> dict:
    config = zlab(net) | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    del config["block_size"]
    config["layer_types"] = ["sliding_attention"] * net.config.num_layers
    config["sliding_window"] = net.config.masks[0].window
    config["dflash_config"] |= {
        "block_size": BLOCK,
        "conv_kernel_size": net.config.convolution.taps,
        "conv_group_size": net.config.convolution.group_size,
        "selector_rank": net.config.selector.rank,
        "selector_top_k": net.config.selector.num_candidates,
    }
    return config


def jetspec(net: BlockNet) -> dict:
    config = zlab(net)
    config["dflash_config"] |= {"causal_head": True}
    return config


def specforge(net: BlockNet) -> dict:
    config = zlab(net)
    config["dflash_config"] |= {"projector_type": "dspark" if net.config.markov else "dflash"}
    if net.config.markov:
        config["dflash_config"] |= heads_of(net)
    return config


def heads_of(net: BlockNet) -> dict:
    config = net.config
    return {
        "markov_rank": config.markov.rank if config.markov else 0,
        "markov_head_type": str(config.markov.kind) if config.markov else "vanilla",
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "hidden_and_token",
    }


def deepspec(net: BlockNet) -> dict:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK,
        "mask_token_id": net.config.mask_id,
        "target_layer_ids": list(net.config.aux_layers),
        **layers_of(net),
        **heads_of(net),
    }


def speculators(net: BlockNet) -> dict:
    config = net.config
    layer = layers_of(net)
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    kind = "dflash"
    if config.markov:
        kind = "dspark"
    elif config.selector:
        kind = "dflash2"
    written = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.aux_layers],
        "block_size": BLOCK,
        "mask_token_id": config.mask_id,
        "draft_vocab_size": config.draft_vocab_size,
        "sample_from_anchor": config.first_draft_slot == 0,
        "transformer_layer_config": layer,
        **heads_of(net),
    }
    if config.selector:
        written |= {
            "conv_kernel_size": config.convolution.taps,
            "conv_group_size": config.convolution.group_size,
            "selector_rank": config.selector.rank,
            "selector_top_k": config.selector.num_candidates,
        }
    if config.masks[0].window:
        layer["layer_types"] = [
            "sliding_attention" if mask.window else "full_attention" for mask in config.masks
        ]
        layer["sliding_window"] = config.masks[0].window
    return written


def write(directory: Path, net: BlockNet, config: dict, own: bool = False) -> Path:
    """A checkpoint directory; own: with its embedding and lm_head."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: net.state_dict()[name].clone() for name in parameter_shapes(net.config)}
    if not own:
        tensors.pop("embed_tokens.weight")
        if net.config.draft_vocab_size == VOCAB:
            tensors.pop("lm_head.weight")
    tensors |= vocabulary_maps(net.target_ids, VOCAB)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory

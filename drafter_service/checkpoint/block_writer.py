"""Writes a trained block drafter in a public layout that our own reader reads.

Without small heads z-lab's, which vLLM and SGLang read; with a serial or a confidence head
speculators', because DeepSpec's own files carry the target's embedding and lm_head, tens of
megabytes that every engine has already. Both leave these two out: they are the target's, frozen in
training. z-lab counts layer outputs, speculators inputs. Knows no training.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafter_service.checkpoint.block_names import BORROWED
from drafter_service.checkpoint.rope_config import rope_parameters
from drafter_service.dflash.config import BlockConfig, ConfidenceInput, LayerMask, Layout
from drafter_service.dflash.net import BlockNet
from protos.errors import CheckpointError

SPECULATORS_VERSION = "0.9.0"  # the release whose layout this follows


def write_block(
    directory: Path,
    net: BlockNet,
    num_target_layers: int,
    verifier_name: str,
    provenance: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """config.json, model.safetensors and, if given, provenance.json; each replaced atomically.

    Raises CheckpointError for what the layouts cannot say.
    """
    refuse_unsayable(net.config)
    if net.config.markov is None and net.config.confidence is None:
        config = zlab_config(net.config, num_target_layers, dtype)
    else:
        config = speculators_config(net.config, verifier_name, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to(dtype).contiguous()
        for name, parameter in net.named_parameters()
        if name not in BORROWED
    }
    temporary = directory / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)  # safetensors writes files for their owner alone
    os.replace(temporary, directory / "model.safetensors")
    _write_json(directory / "config.json", config)
    if provenance is not None:
        _write_json(directory / "provenance.json", provenance)


def refuse_unsayable(config: BlockConfig) -> None:
    """Raises CheckpointError, naming what is written in neither layout here."""
    has_heads = config.markov is not None or config.confidence is not None
    unsayable = {
        "masks of other than full layers": any(mask != LayerMask() for mask in config.masks),
        "convolutions": config.convolution is not None,
        "a path selector": config.selector is not None,
        "a reduced vocabulary": config.draft_vocab_size != config.vocab_size,
        "scaled logits": config.output_multiplier != 1.0 or config.softcap is not None,
        "a scaled embedding": config.embedding_scale != 1.0,
        "small heads on an in-place block": has_heads and config.layout is Layout.IN_PLACE,
        "an anchor-first block without small heads": not has_heads
        and config.layout is Layout.ANCHOR_FIRST,
    }
    found = [name for name, present in unsayable.items() if present]
    if found:
        raise CheckpointError(f"no layout is written here for {', '.join(found)}")


def zlab_config(config: BlockConfig, num_target_layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """An in-place block's facts in z-lab's words."""
    return _layer_words(config) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_id,
            "target_layer_ids": list(config.aux_layers),
        },
        "dtype": str(dtype).removeprefix("torch."),
        "is_causal": False,
        "num_target_layers": num_target_layers,
        "rope_scaling": None if config.rope.kind == "default" else rope_parameters(config.rope),
        "rope_theta": config.rope.theta,
    }


def speculators_config(
    config: BlockConfig, verifier_name: str, dtype: torch.dtype
) -> dict[str, Any]:
    """An anchor-first block's facts, its small heads included, in speculators' words."""
    markov, confidence = config.markov, config.confidence
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.num_drafts,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.aux_layers],
        "block_size": config.block_size,
        "confidence_head_with_markov": confidence is ConfidenceInput.HIDDEN_AND_TOKEN,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "enable_confidence_head": confidence is not None,
        "markov_head_type": str(markov.kind) if markov else "vanilla",
        "markov_rank": markov.rank if markov else 0,
        "mask_token_id": config.mask_id,
        "sample_from_anchor": True,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": verifier_name},
        },
        "speculators_model_type": "dspark",
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_words(config)
        | {"rope_parameters": rope_parameters(config.rope)},
    }


def _layer_words(config: BlockConfig) -> dict[str, Any]:
    """The decoder layers, in transformers' words."""
    return {
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_positions,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, path)

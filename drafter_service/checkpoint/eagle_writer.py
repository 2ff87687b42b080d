"""Writes a trained EAGLE-1 head in the EAGLE repository's layout, which our own reader reads.

A plain one-layer Llama config and the head's tensors; embedding and lm_head are left out, they are
the target's, frozen in training (`reference/eagle.md` 2). Knows no training.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafter_service.checkpoint.eagle_family import BORROWED, names_and_shapes
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle.head import EagleHead
from protos.errors import CheckpointError


def write_eagle(
    directory: Path,
    head: EagleHead,
    provenance: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """config.json, model.safetensors and, if given, provenance.json; each replaced atomically."""
    names, _ = names_and_shapes(head.config)
    parameters = dict(head.named_parameters())
    tensors = {
        name: parameters[ours].detach().to(dtype).contiguous()
        for ours, name in names.items()
        if ours not in BORROWED
    }
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)  # safetensors writes files for their owner alone
    os.replace(temporary, directory / "model.safetensors")
    _write_json(directory / "config.json", eagle_config(head.config, dtype))
    if provenance is not None:
        _write_json(directory / "provenance.json", dict(provenance))


def eagle_config(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The head's facts as the EAGLE repository says them; `bias` is fc's and always explicit.

    Raises CheckpointError for a scaled rope, whose base that repository ignores.
    """
    layer = config.layer
    if config.rope.kind != "default":
        raise CheckpointError(f"the EAGLE layout has no word for a rope of type {config.rope.kind}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": layer.attention_bias,
        "bias": config.fc_bias,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": layer.mlp_bias,
        "model_type": "llama",
        "num_attention_heads": layer.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **({"qkv_bias": True} if layer.qkv_bias else {}),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, path)

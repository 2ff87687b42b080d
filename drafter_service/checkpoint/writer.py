"""Writes a trained head in the speculators layout, which vLLM and our own reader read.

`embed_tokens.weight` is left out: it is the target's, frozen in training, and engines share the
target's when a head has none. Aux layers are written as layer INPUTS, one more than ours;
`norm_before_residual` is always explicit, because its default differs between readers
(`reference/eagle.md` 4.4). Knows no training.

Shapes: V target vocabulary, W draft vocabulary.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter_service.checkpoint.eagle3_names import public_names
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from protos.errors import CheckpointError

LAYER_PREFIX = "layers.0."
SPECULATORS_VERSION = "0.9.0"  # the release whose layout this follows
DRAFT_TOKENS = 4


def write_eagle3(
    directory: Path,
    head: Eagle3Head,
    verifier_name: str,
    dtype: torch.dtype = torch.bfloat16,
    provenance: dict[str, Any] | None = None,
) -> None:
    """config.json, model.safetensors and, if given, provenance.json; each replaced atomically."""
    config = head.config
    if config.input_norm_on_hidden or not config.norm_logits or config.fc_bias:
        raise CheckpointError("the speculators layout has no word for this head's norms or bias")
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(head.named_parameters())
    names = public_names(config, LAYER_PREFIX)
    names.pop("embed_tokens.weight")
    tensors = {
        name: parameters[ours].detach().to(dtype).contiguous() for ours, name in names.items()
    }
    tensors.update(vocabulary_maps(head.target_ids, config.vocab_size))
    temporary = directory / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)  # safetensors writes files for their owner alone
    os.replace(temporary, directory / "model.safetensors")
    _write_json(directory / "config.json", speculators_config(config, verifier_name, dtype))
    if provenance is not None:
        _write_json(directory / "provenance.json", provenance)


def vocabulary_maps(target_ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t [W] offsets and t2d [V] marks; nothing when the draft vocabulary is the target's."""
    num_kept = len(target_ids_W)
    if num_kept == vocab_size:
        return {}
    kept_V = torch.zeros(vocab_size, dtype=torch.bool)
    kept_V[target_ids_W] = True
    return {"d2t": target_ids_W - torch.arange(num_kept), "t2d": kept_V}


def speculators_config(
    config: Eagle3Config, verifier_name: str, dtype: torch.dtype
) -> dict[str, Any]:
    """The head's facts in speculators' words."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.aux_layers],
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_feedback,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": DRAFT_TOKENS,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": verifier_name},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": (
            None if config.target_hidden_size == config.hidden_size else config.target_hidden_size
        ),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config),
    }


def _layer_config(config: Eagle3Config) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.rope.theta, "rope_type": config.rope.kind}
    if config.rope.kind == "llama3":
        rope |= {
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_positions,
        }
    return {
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, path)

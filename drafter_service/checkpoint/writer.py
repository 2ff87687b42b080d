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
from drafter_service.checkpoint.rope_config import rope_parameters
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from protos.errors import CheckpointError
from protos.features import FINAL_LAYER

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
    refuse_unsayable(config)
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(head.named_parameters())
    names = public_names(config, LAYER_PREFIX)
    if config.hidden_size == config.target_hidden_size:
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


def refuse_unsayable(config: Eagle3Config) -> None:
    """Raises CheckpointError, naming what speculators' layout cannot say of this head."""
    unsayable = {
        "a norm before the hidden norm": config.input_norm_on_hidden,
        "logits without a final norm": not config.norm_logits,
        "fc.bias": config.fc_bias,
        "no fc": not config.has_fc,
        "several layers with doubled input": config.doubled_layers and config.num_layers > 1,
        "features of the final norm": FINAL_LAYER in config.aux_layers,
    }
    found = [name for name, present in unsayable.items() if present]
    if found:
        raise CheckpointError(f"the speculators layout has no word for {', '.join(found)}")


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
    kind = "eagle3" if config.mask_token_id is None else "peagle"
    mask = {} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}
    return mask | {
        "architectures": [
            "Eagle3DraftModel" if config.mask_token_id is None else "PEagleSpeculator"
        ],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.aux_layers],
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_feedback,
        "speculators_config": {
            "algorithm": kind,
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
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": (
            None if config.target_hidden_size == config.hidden_size else config.target_hidden_size
        ),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config),
    }


def _layer_config(config: Eagle3Config) -> dict[str, Any]:
    slides = any(config.windows)
    window: dict[str, Any] = (
        {
            "layer_types": ["sliding_attention" if w else "full_attention" for w in config.windows],
            "sliding_window": next(w for w in config.windows if w),
            "use_sliding_window": True,
        }
        if slides
        else {}
    )
    return (
        window
        | {
            "attention_bias": config.attention_bias,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_positions,
            "mlp_bias": config.mlp_bias,
            "model_type": "qwen3" if config.qk_norm else "llama",
            "num_attention_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "num_key_value_heads": config.num_kv_heads,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": rope_parameters(config.rope),
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": config.vocab_size,
        }
        | ({"qkv_bias": True} if config.qkv_bias else {})
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, path)

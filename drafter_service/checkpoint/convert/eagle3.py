"""EAGLE-3 heads in speculators' layout (vLLM) and in SpecForge's (SGLang).

| | speculators | SpecForge |
|---|---|---|
| first layer | `layers.0.` | `midlayer.` |
| layer ids | inputs | outputs where the first is 1, else inputs (below) |
| feedback after the norm | `norm_output` | `norm_output` |

SGLang before May 2026 takes ids in the file as outputs, later ones only when the first id is 1,
else as inputs (`reference/eagle.md` 4.1). Ids that begin with 1 mean the same to all of them.
"""

from typing import Any

import torch

from drafter_service.checkpoint.convert.source import Converted, Source
from drafter_service.checkpoint.convert.words import old_rope_keys, refuse
from drafter_service.checkpoint.eagle3_names import public_names
from drafter_service.checkpoint.writer import refuse_unsayable, speculators_config
from drafter_service.eagle3.config import Eagle3Config
from protos.features import FINAL_LAYER

_INPUT_IDS = (
    "layer ids are written as layer inputs, as SGLang reads them from May 2026 on; older ones add 1"
)
_RESIDUAL = "norm_before_residual is on: an SGLang that does not know the key drafts wrongly"


def to_speculators(source: Source, verifier_name: str) -> Converted:
    """Raises CheckpointError for a head that vLLM's layout cannot say."""
    config: Eagle3Config = source.described.config
    refuse_unsayable(config)
    dtype = getattr(torch, source.dtype)
    return Converted(
        speculators_config(config, verifier_name, dtype), _tensors(source, config, "layers.0.")
    )


def to_specforge(source: Source) -> Converted:
    """Raises CheckpointError for a head that SpecForge's layout cannot say."""
    config: Eagle3Config = source.described.config
    refuse(
        "SpecForge",
        {
            "several layers": config.num_layers > 1,
            "norms on queries and keys": config.qk_norm,
            "sliding windows": any(config.windows),
            "a norm before the hidden norm": config.input_norm_on_hidden,
            "parallel drafting": config.mask_token_id is not None,
            "no fc": not config.has_fc,
            "features of the final norm": FINAL_LAYER in config.aux_layers,
            "normed feedback without a final norm": config.norm_feedback and not config.norm_logits,
        },
    )
    are_outputs = config.aux_layers[0] == 1
    notes = [_INPUT_IDS] if not are_outputs else []
    notes += [_RESIDUAL] if config.norm_before_residual else []
    ids = [layer if are_outputs else layer + 1 for layer in config.aux_layers]
    told = _specforge_config(config, ids, source.dtype)
    return Converted(told, _tensors(source, config, "midlayer."), tuple(notes))


def _specforge_config(config: Eagle3Config, ids: list[int], dtype: str) -> dict[str, Any]:
    switches = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_feedback,
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
    }
    told: dict[str, Any] = {name: True for name, is_on in switches.items() if is_on}
    if not config.norm_logits:
        told["norm_output"] = False
    if config.target_hidden_size != config.hidden_size:
        told["target_hidden_size"] = config.target_hidden_size
    return told | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": config.attention_bias,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": config.mlp_bias,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **old_rope_keys(config.rope),
    }


def _tensors(source: Source, config: Eagle3Config, prefix: str) -> dict[str, torch.Tensor]:
    names = public_names(config, prefix)
    return {names[ours]: tensor for ours, tensor in source.weights.items()} | dict(source.maps)

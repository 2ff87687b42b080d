"""Block drafters in speculators' layout (vLLM) and in z-lab's, or SpecForge's for DSpark (SGLang).

| | speculators | z-lab, SpecForge |
|---|---|---|
| decoder layers | nested in `transformer_layer_config` | at top level |
| layer ids | inputs | outputs |
| which slots are drafts | `sample_from_anchor` | in-place; DSpark anchor-first |
| a sliding window counts | from the anchor | from each slot |

Neither keeps the embedding, nor lm_head of a full vocabulary: both are the target's. Tensors are
called alike everywhere (`reference/dflash.md` 1.10).
"""

from typing import Any

from torch import Tensor

from drafter_service.checkpoint.block_names import BORROWED
from drafter_service.checkpoint.convert.source import Converted, Source
from drafter_service.checkpoint.convert.words import FULL, SLIDING, old_rope_keys, proposals, refuse
from drafter_service.checkpoint.rope_config import rope_parameters
from drafter_service.checkpoint.writer import SPECULATORS_VERSION
from drafter_service.dflash.config import BlockConfig, ConfidenceInput, Layout

_SPECULATORS = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
_SHIFTED = "the anchor's own slot drafts too: `shift_label` says so, and few engines read it"


def to_speculators(source: Source, verifier_name: str) -> Converted:
    """Raises CheckpointError for a drafter that vLLM's layout cannot say."""
    config: BlockConfig = source.described.config
    sliding = [mask for mask in config.masks if mask.window is not None]
    refuse(
        "speculators",
        {
            "full layers that are causal": any(m.causal for m in config.masks if m.window is None),
            "windows counted from each slot": any(not m.window_from_anchor for m in sliding),
            "several windows": len({(m.window, m.causal) for m in sliding}) > 1,
            "a scaled embedding": config.embedding_scale != 1.0,
            "scaled logits": config.output_multiplier != 1.0,
            "a soft cap": config.softcap is not None,
            "the embedding's output as a feature of two": config.aux_layers[0] < -1,
        },
    )
    kind = _speculators_kind(config)
    anchored = config.layout is Layout.ANCHOR_FIRST
    own = config.target_hidden_size == config.hidden_size
    told: dict[str, Any] = {
        "architectures": [_SPECULATORS[kind]],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.aux_layers],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": source.dtype,
        "mask_token_id": config.mask_id,
        "sample_from_anchor": anchored,
        "sliding_window_non_causal": bool(sliding) and not sliding[0].causal,
        "speculators_config": proposals(kind, config.num_drafts, verifier_name),
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None if own else config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_keys(config)
        | {"rope_parameters": rope_parameters(config.rope)},
        **_dflash2_keys(config),
        **(_dspark_keys(config) if kind == "dspark" else {}),
    }
    tensors, notes = _tensors(source, config)
    return Converted(told, tensors, notes)


def to_sglang(source: Source, num_target_layers: int | None) -> Converted:
    """Raises CheckpointError for a drafter that z-lab's and SpecForge's layouts cannot say."""
    config: BlockConfig = source.described.config
    is_dspark = _speculators_kind(config) == "dspark"
    sliding = [mask for mask in config.masks if mask.window is not None]
    causal = {mask.causal for mask in config.masks}
    follows_kind = all(mask.causal is (mask.window is not None) for mask in config.masks)
    refuse(
        "z-lab",
        {
            "windows counted from the anchor": any(m.window_from_anchor for m in sliding),
            "several windows": len({m.window for m in sliding}) > 1,
            "layers that differ in causality": len(causal) > 1 and not follows_kind,
            "DSpark heads on in-place slots": is_dspark and config.layout is Layout.IN_PLACE,
        },
    )
    fields: dict[str, Any] = {
        "mask_token_id": config.mask_id,
        "target_layer_ids": list(config.aux_layers),
        **_dflash2_keys(config),
    }
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    if is_dspark:
        fields |= {"projector_type": "dspark", **_dspark_keys(config)}
    shifted = config.layout is Layout.ANCHOR_FIRST and not is_dspark
    if shifted:
        fields["shift_label"] = True
    told = _layer_keys(config) | _scales(config) | old_rope_keys(config.rope)
    told |= {"architectures": [_architecture(config, is_dspark)], "dtype": source.dtype}
    told |= {"block_size": config.block_size, "dflash_config": fields}
    told |= {} if follows_kind else {"is_causal": causal.pop()}
    if config.draft_vocab_size != config.vocab_size:
        told["draft_vocab_size"] = config.draft_vocab_size
    if num_target_layers is not None:
        told["num_target_layers"] = num_target_layers
    tensors, notes = _tensors(source, config)
    return Converted(told, tensors, (*notes, _SHIFTED) if shifted else notes)


def _speculators_kind(config: BlockConfig) -> str:
    if config.markov is not None or config.confidence is not None:
        return "dspark"
    return "dflash2" if config.selector is not None or config.convolution is not None else "dflash"


def _architecture(config: BlockConfig, is_dspark: bool) -> str:
    return _SPECULATORS["dspark" if is_dspark else _speculators_kind(config)]


def _layer_keys(config: BlockConfig) -> dict[str, Any]:
    windows = [mask.window for mask in config.masks]
    return {
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "max_position_embeddings": config.max_positions,
        "max_window_layers": config.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "sliding_window": next((window for window in windows if window is not None), None),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": any(window is not None for window in windows),
        "vocab_size": config.vocab_size,
    }


def _dflash2_keys(config: BlockConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if config.convolution is not None:
        keys["conv_kernel_size"] = config.convolution.taps
        keys["conv_group_size"] = config.convolution.group_size
    if config.selector is not None:
        keys["selector_rank"] = config.selector.rank
        keys["selector_top_k"] = config.selector.num_candidates
    return keys


def _dspark_keys(config: BlockConfig) -> dict[str, Any]:
    markov, confidence = config.markov, config.confidence
    return {
        "markov_rank": 0 if markov is None else markov.rank,
        "markov_head_type": "vanilla" if markov is None else str(markov.kind),
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is ConfidenceInput.HIDDEN_AND_TOKEN,
    }


def _scales(config: BlockConfig) -> dict[str, Any]:
    scales = {
        "input_embedding_scale": (config.embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.softcap, None),
    }
    return {name: value for name, (value, usual) in scales.items() if value != usual}


def _tensors(source: Source, config: BlockConfig) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Everything but copies of the target's own weights, and a note about those."""
    is_full = config.draft_vocab_size == config.vocab_size
    dropped = [
        name
        for name in BORROWED
        if name in source.weights and (is_full or name == "embed_tokens.weight")
    ]
    kept = {name: tensor for name, tensor in source.weights.items() if name not in dropped}
    note = f"left out, engines use the target's: {', '.join(dropped)}"
    return kept | dict(source.maps), (note,) if dropped else ()

"""The public dialects of an EAGLE-3 config.json, read into `Eagle3Config`. Torch-free.

| dialect | how it is known | aux ids in the file | norm_output |
|---|---|---|---|
| speculators (vLLM) | `speculators_model_type` | layer inputs | normed feedback |
| Model-Optimizer | `eagle_config` with `use_aux_hidden_state` | layer outputs | - |
| SpecForge | `LlamaForCausalLMEagle3` | `eagle_config`: layer outputs | false: no final norm |
| DeepSpec | `target_layer_ids` | layer outputs | - |
| SafeAILab | `draft_vocab_size` alone | none: inputs of 2, L/2, L-3 | - |

Sources: `reference/eagle.md` 0.1, 4.1, 4.4, 4.5. Invariant: what this cannot honour is refused by
name; nothing is ignored silently that changes a draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafter_service.checkpoint.safetensors_header import TensorInfo
from drafter_service.eagle3.config import ROPE_KINDS, Eagle3Config, Rope
from protos.errors import CheckpointError

Json = Mapping[str, Any]
DEFAULT_THETA = 10000.0
AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the dialects disagree on, made explicit."""

    name: str
    layer: Json
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_feedback: bool
    norm_logits: bool
    input_norm_on_hidden: bool


def read_config(
    config: Json, tensors: Mapping[str, TensorInfo], num_target_layers: int | None
) -> Eagle3Config:
    """`num_target_layers` is needed only by files that do not name their aux layers.

    Raises CheckpointError when the file asks for something this head does not do.
    """
    try:
        return _read_config(config, tensors, num_target_layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"config.json of an EAGLE-3 head cannot be used: {reason}") from error


def _read_config(
    config: Json, tensors: Mapping[str, TensorInfo], num_target_layers: int | None
) -> Eagle3Config:
    dialect = read_dialect(config)
    layer = dialect.layer
    _refuse_unsupported(layer, config)
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    vocab = int(layer["vocab_size"])
    target_hidden = int(config.get("target_hidden_size") or hidden)
    aux_layers = dialect.aux_layers or _default_aux_layers(num_target_layers)
    names = {name.removeprefix("model.") for name in tensors}
    fc = next((info for name, info in tensors.items() if name.endswith("fc.weight")), None)
    if fc is None or len(fc.shape) != 2 or fc.shape[1] != len(aux_layers) * target_hidden:
        raise CheckpointError(
            f"fc.weight of shape {fc and fc.shape} does not take {len(aux_layers)} aux layers "
            f"{aux_layers} of width {target_hidden}"
        )
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        aux_layers=aux_layers,
        num_heads=heads,
        num_kv_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        intermediate_size=int(layer["intermediate_size"]),
        rope=read_rope(layer),
        norm_eps=float(layer["rms_norm_eps"]),
        vocab_size=vocab,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab),
        max_positions=int(layer.get("max_position_embeddings", 2048)),
        norm_before_residual=dialect.norm_before_residual,
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_feedback=dialect.norm_feedback,
        norm_logits=dialect.norm_logits,
        attention_bias=bool(layer.get("attention_bias", False)),
        fc_bias="fc.bias" in names,
        qk_norm=layer.get("model_type") == "qwen3",
        input_norm_on_hidden=dialect.input_norm_on_hidden,
    )


def read_dialect(config: Json) -> Dialect:
    """Which project wrote this file. Raises CheckpointError when none we know did."""
    if "speculators_model_type" in config:
        return _speculators(config)
    eagle = config.get("eagle_config") or {}
    residual = bool(config.get("norm_before_residual", False))
    if "use_aux_hidden_state" in eagle:
        return _model_optimizer(config, eagle)
    if "target_layer_ids" in config:
        ids = tuple(int(layer) for layer in config["target_layer_ids"])
        return Dialect("deepspec", config, ids, residual, False, True, False)
    if "draft_vocab_size" not in config:
        raise CheckpointError("not an EAGLE-3 config: no draft_vocab_size, no known marker")
    aux_ids = eagle.get(AUX_KEY)
    aux = tuple(int(layer) for layer in aux_ids) if aux_ids else None
    if "LlamaForCausalLMEagle3" in (config.get("architectures") or []):
        normed = bool(config.get("norm_output", True))
        return Dialect("specforge", config, aux, residual, False, normed, False)
    return Dialect("safeailab", config, aux, residual, False, True, False)


def _speculators(config: Json) -> Dialect:
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise CheckpointError(f"speculators_model_type {kind!r}, expected 'eagle3'")
    aux_ids = config.get(AUX_KEY)
    aux = tuple(int(layer) - 1 for layer in aux_ids) if aux_ids else None
    return Dialect(
        name="speculators",
        layer=config["transformer_layer_config"],
        aux_layers=aux,
        norm_before_residual=bool(config.get("norm_before_residual", True)),  # vLLM's default
        norm_feedback=bool(config.get("norm_output", False)),
        norm_logits=True,
        input_norm_on_hidden=False,
    )


def _model_optimizer(config: Json, eagle: Json) -> Dialect:
    expected = {
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "parallel_draft_step": 1,
    }
    for key, value in expected.items():
        if eagle.get(key, value) != value:
            raise CheckpointError(f"eagle_config.{key}: {eagle[key]!r} is not supported")
    aux_ids = eagle.get(AUX_KEY)
    return Dialect(
        name="modelopt",
        layer=config,
        aux_layers=tuple(int(layer) for layer in aux_ids) if aux_ids else None,
        norm_before_residual=False,
        norm_feedback=False,
        norm_logits=True,
        input_norm_on_hidden=bool(eagle.get("use_input_layernorm_in_first_layer", True)),
    )


def read_rope(layer: Json) -> Rope:
    """Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    scaling: dict[str, Any] = dict(layer.get("rope_scaling") or {})
    scaling.update(layer.get("rope_parameters") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"rope type {kind!r} is not supported, only {ROPE_KINDS}")
    theta = scaling.get("rope_theta") or layer.get("rope_theta") or DEFAULT_THETA
    if kind == "default":
        return Rope(theta=float(theta))
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_positions=int(scaling["original_max_position_embeddings"]),
    )


def _default_aux_layers(num_target_layers: int | None) -> tuple[int, ...]:
    """Inputs of 2, L/2 and L-3, which are outputs of one layer less; equal ones collapse."""
    if num_target_layers is None:
        raise CheckpointError("the head names no aux layers, and the target's depth is unknown")
    inputs = {2, num_target_layers // 2, num_target_layers - 3}
    return tuple(sorted(layer - 1 for layer in inputs))


def _refuse_unsupported(layer: Json, config: Json) -> None:
    refused = {
        "several layers": int(layer.get("num_hidden_layers", 1)) != 1,
        f"hidden_act {layer.get('hidden_act')!r}": layer.get("hidden_act", "silu") != "silu",
        f"model_type {layer.get('model_type')!r}": layer.get("model_type", "llama")
        not in ("llama", "qwen3"),
        "sliding-window attention": bool(layer.get("use_sliding_window"))
        or "sliding_attention" in (layer.get("layer_types") or [])
        or (layer.get("model_type") == "llama" and bool(layer.get("sliding_window"))),
        "mlp_bias": bool(layer.get("mlp_bias")),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        "logit_scale": config.get("logit_scale", 1.0) not in (None, 1.0),
    }
    for name, found in refused.items():
        if found:
            raise CheckpointError(f"EAGLE-3 head with {name} is not supported")

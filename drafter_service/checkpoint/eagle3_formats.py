"""The public dialects of an EAGLE-3 config.json, read into `Eagle3Config`. Torch-free.

| dialect | how it is known | aux ids in the file | norm_output |
|---|---|---|---|
| speculators (vLLM) | `speculators_model_type` | layer inputs | normed feedback |
| Model-Optimizer | `eagle_config` with `use_aux_hidden_state` | layer outputs | - |
| SpecForge | `LlamaForCausalLMEagle3` | unsaid: either | false: no final norm |
| DeepSpec | `target_layer_ids` | layer outputs | - |
| SafeAILab | `draft_vocab_size` alone | none, or either | - |

Where a file leaves open what was trained, every reading is listed, the likelier first: `variants`.
Sources: `reference/eagle.md` 0.1, 4.1, 4.4, 4.5. Invariant: what this cannot honour is refused by
name; nothing is ignored silently that changes a draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drafter_service.checkpoint.aux_ids import Convention, Ids, read_aux_ids
from drafter_service.checkpoint.rope_config import DEFAULT_THETA
from drafter_service.checkpoint.rope_config import read_rope as read_rope
from drafter_service.checkpoint.safetensors_header import TensorInfo
from drafter_service.eagle3.config import Eagle3Config, Rope
from protos.errors import CheckpointError
from protos.features import FINAL_LAYER

Json = Mapping[str, Any]
Variants = dict[str, Eagle3Config]
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
_PLAIN = "plain rope"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the dialects disagree on, made explicit. aux_ids None: the default ones."""

    name: str
    layer: Json
    aux_ids: tuple[int, ...] | None
    convention: Convention
    norm_before_residual: bool
    norm_feedback: bool = False
    norm_logits: bool = True
    input_norm_on_hidden: bool = False
    doubled_layers: bool = False
    scaled_theta: float | None = None
    final_feature: bool = False


def read_configs(
    config: Json, tensors: Mapping[str, TensorInfo], num_target_layers: int | None
) -> Variants:
    """Every way this head may have been meant, by label; the first is the default.

    `num_target_layers` is needed by files that do not name their aux layers. Raises
    CheckpointError, KeyError, TypeError or ValueError for what this head does not do.
    """
    dialect = read_dialect(config)
    _refuse_unsupported(dialect.layer, config)
    readings: dict[Convention, Ids]
    if dialect.final_feature:
        readings = {Convention.OUTPUTS: (FINAL_LAYER,)}
    else:
        readings = read_aux_ids(dialect.aux_ids, dialect.convention, num_target_layers)
    base = {
        f"aux {name}" if len(readings) > 1 else "": _config(config, dialect, layers, tensors)
        for name, layers in readings.items()
    }
    found: Variants = {}
    for label, variant in base.items():
        for more, other in _untold_switches(dialect, variant).items():
            found[", ".join(part for part in (label, more) if part) or "as written"] = other
    return found


def _untold_switches(dialect: Dialect, config: Eagle3Config) -> Variants:
    """What the same file meant in another release of the project that wrote it."""
    found = {"": config}
    if dialect.name == "specforge" and dialect.layer.get("norm_output"):
        found["normed feedback"] = replace(config, norm_feedback=True)
    if dialect.name == "modelopt":
        found["one hidden norm"] = replace(config, input_norm_on_hidden=False)
        rope = config.rope
        if rope.kind == "yarn" and (rope.factor, rope.original_max_positions) == (32.0, 2048):
            # Injected by the project's export; heads were trained without it.
            for label, other in list(found.items()):
                plain = replace(other, rope=Rope(rope.theta))
                found[f"{label}, {_PLAIN}" if label else _PLAIN] = plain
    return found


def _config(
    config: Json, dialect: Dialect, aux_layers: Ids, tensors: Mapping[str, TensorInfo]
) -> Eagle3Config:
    layer = dialect.layer
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    vocab = int(layer["vocab_size"])
    target_hidden = int(config.get("target_hidden_size") or hidden)
    names = {name.removeprefix("model."): info for name, info in tensors.items()}
    _check_fc(names.get("fc.weight"), aux_layers, target_hidden, hidden, dialect.final_feature)
    num_layers = int(config.get("draft_num_hidden_layers") or layer.get("num_hidden_layers") or 1)
    biased = {name.rpartition(".")[0].rpartition(".")[2] for name in names if _is_bias(name)}
    attention_bias = bool(layer.get("attention_bias", False)) or "o_proj" in biased
    if "q_proj" in biased and "o_proj" not in biased:
        attention_bias = False  # what the flag means differs between families
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        aux_layers=aux_layers,
        num_heads=heads,
        num_kv_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        intermediate_size=int(layer["intermediate_size"]),
        rope=read_rope(layer, dialect.scaled_theta),
        norm_eps=float(layer["rms_norm_eps"]),
        vocab_size=vocab,
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab),
        max_positions=int(layer.get("max_position_embeddings", 2048)),
        norm_before_residual=dialect.norm_before_residual,
        norm_before_fc=_flag(config, "norm_before_fc"),
        fc_norm=_flag(config, "fc_norm"),
        norm_feedback=dialect.norm_feedback,
        norm_logits=dialect.norm_logits,
        attention_bias=attention_bias,
        qkv_bias=not attention_bias and ("q_proj" in biased or bool(layer.get("qkv_bias", False))),
        mlp_bias="gate_proj" in biased or bool(layer.get("mlp_bias", False)),
        fc_bias="fc.bias" in names,
        qk_norm=layer.get("model_type") == "qwen3",
        input_norm_on_hidden=dialect.input_norm_on_hidden,
        num_layers=num_layers,
        doubled_layers=dialect.doubled_layers,
        windows=read_windows(layer, num_layers),
        has_fc="fc.weight" in names,
        mask_token_id=_mask_token(config, names),
    )


def _is_bias(name: str) -> bool:
    return name.endswith("_proj.bias")


def _check_fc(
    fc: TensorInfo | None, aux_layers: Ids, target_hidden: int, hidden: int, may_lack: bool
) -> None:
    if fc is None and may_lack:
        return
    if fc is None or len(fc.shape) != 2 or fc.shape[1] != len(aux_layers) * target_hidden:
        raise CheckpointError(
            f"fc.weight of shape {fc and fc.shape} does not take {len(aux_layers)} aux layers "
            f"{aux_layers} of width {target_hidden} into a head of width {hidden}"
        )


def _flag(config: Json, key: str) -> bool:
    """A switch that stands at the top or in `eagle_config`."""
    return bool(config.get(key) or (config.get("eagle_config") or {}).get(key) or False)


def _mask_token(config: Json, names: Mapping[str, TensorInfo]) -> int | None:
    """The id in masked rows; None for a head that has no placeholder for their features."""
    parallel = config.get("speculators_model_type") == "peagle" or "mask_hidden" in names
    if not parallel:
        return None
    for key in MASK_KEYS:
        if config.get(key) is not None:
            return int(config[key])
    raise CheckpointError(f"a head that drafts in parallel needs one of {', '.join(MASK_KEYS)}")


def read_windows(layer: Json, num_layers: int) -> tuple[int | None, ...]:
    """Per layer, how many rows back it attends; None: all. Raises CheckpointError."""
    types = layer.get("layer_types")
    if types is None:
        first = int(layer.get("max_window_layers") or 0)
        slides = bool(layer.get("use_sliding_window"))
        types = ["sliding_attention" if slides and n >= first else "" for n in range(num_layers)]
    known = ("", "full_attention", "sliding_attention")
    if len(types) < num_layers or any(kind not in known for kind in types):
        raise CheckpointError(f"layer_types {types} of {num_layers} layers are not supported")
    window = layer.get("sliding_window")
    if "sliding_attention" in types and not window:
        raise CheckpointError("sliding_attention without sliding_window")
    width = int(window or 0)
    return tuple(width if kind == "sliding_attention" else None for kind in types[:num_layers])


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
        return Dialect("deepspec", config, ids, Convention.OUTPUTS, residual, doubled_layers=True)
    if "draft_vocab_size" not in config and "Eagle3" not in str(config.get("architectures")):
        raise CheckpointError("not an EAGLE-3 config: no draft_vocab_size, no known marker")
    aux_ids = eagle.get(AUX_KEY) or config.get(AUX_KEY)
    aux = tuple(int(layer) for layer in aux_ids) if aux_ids else None
    if "LlamaForCausalLMEagle3" in (config.get("architectures") or []):
        normed = bool(config.get("norm_output", True))
        return Dialect("specforge", config, aux, Convention.UNKNOWN, residual, norm_logits=normed)
    return Dialect(
        "safeailab", config, aux, Convention.UNKNOWN, residual, scaled_theta=DEFAULT_THETA
    )


def _speculators(config: Json) -> Dialect:
    kind = config["speculators_model_type"]
    if kind not in ("eagle3", "peagle"):
        raise CheckpointError(f"speculators_model_type {kind!r}, expected 'eagle3' or 'peagle'")
    aux_ids = config.get(AUX_KEY)
    return Dialect(
        name="speculators",
        layer=config["transformer_layer_config"],
        aux_ids=tuple(int(layer) for layer in aux_ids) if aux_ids else None,
        convention=Convention.INPUTS,
        norm_before_residual=bool(config.get("norm_before_residual", True)),  # vLLM's default
        norm_feedback=bool(config.get("norm_output", False)),
    )


def _model_optimizer(config: Json, eagle: Json) -> Dialect:
    expected = {"use_last_layernorm": True, "use_mtp_layernorm": False, "parallel_draft_step": 1}
    for key, value in expected.items():
        if eagle.get(key, value) != value:
            raise CheckpointError(f"eagle_config.{key}: {eagle[key]!r} is not supported")
    aux_ids = eagle.get(AUX_KEY)
    return Dialect(
        name="modelopt",
        layer=config,
        aux_ids=tuple(int(layer) for layer in aux_ids) if aux_ids else None,
        convention=Convention.OUTPUTS,
        norm_before_residual=False,
        input_norm_on_hidden=bool(eagle.get("use_input_layernorm_in_first_layer", True)),
        final_feature=not eagle["use_aux_hidden_state"],
    )


def _refuse_unsupported(layer: Json, config: Json) -> None:
    refused = {
        f"hidden_act {layer.get('hidden_act')!r}": layer.get("hidden_act", "silu") != "silu",
        f"model_type {layer.get('model_type')!r}": layer.get("model_type", "llama")
        not in ("llama", "qwen3"),
        "logit_scale": config.get("logit_scale", 1.0) not in (None, 1.0),
        "quantization_config": bool(config.get("quantization_config")),
    }
    for name, found in refused.items():
        if found:
            raise CheckpointError(f"EAGLE-3 head with {name} is not supported")

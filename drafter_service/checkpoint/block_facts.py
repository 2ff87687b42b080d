"""What the dialects of a block drafter's config.json share: the decoder layers. Torch-free.

Every dialect writes the layers in transformers' words (Qwen3 layers: norms on queries and keys);
they differ in where blocks, masks and heads are described. Sources: `reference/dflash.md` 1.7 to
1.9. Invariant: what cannot be honoured is refused by name, nothing is ignored that changes a draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafter_service.checkpoint.description import Json
from drafter_service.checkpoint.rope_config import read_rope
from drafter_service.checkpoint.safetensors_header import TensorInfo
from drafter_service.dflash.config import (
    BlockConfig,
    ConfidenceInput,
    Convolution,
    LayerMask,
    Layout,
    Markov,
    MarkovKind,
    Selector,
)
from protos.errors import CheckpointError

SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", SLIDING)
_UNSUPPORTED = (
    "attention_sink_bias",
    "attention_value_scale",
    "num_experts",
    "quantization_config",
)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What the dialects disagree on, made explicit. mask_id and aux_layers None: not stated."""

    layer: Json
    layout: Layout
    block_size: int
    mask_id: int | None
    aux_layers: tuple[int, ...] | None
    masks: tuple[LayerMask, ...]
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    convolution: Convolution | None = None
    selector: Selector | None = None
    markov: Markov | None = None
    confidence: ConfidenceInput | None = None
    notes: tuple[str, ...] = ()


def block_config(facts: BlockFacts, tensors: Mapping[str, TensorInfo]) -> BlockConfig:
    """The drafter's config. Raises CheckpointError, naming what is missing or not supported."""
    layer = facts.layer
    _refuse_unsupported(layer)
    if facts.mask_id is None:
        raise CheckpointError("mask_token_id is missing: a block cannot be filled without it")
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    vocab = int(layer["vocab_size"])
    num_layers = int(layer["num_hidden_layers"])
    target_hidden = facts.target_hidden_size or hidden
    aux_layers = facts.aux_layers or default_aux_layers(facts.num_target_layers, num_layers)
    _check_projection(tensors, aux_layers, target_hidden, hidden)
    return BlockConfig(
        layout=facts.layout,
        block_size=facts.block_size,
        mask_id=facts.mask_id,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        aux_layers=aux_layers,
        masks=facts.masks,
        num_heads=heads,
        num_kv_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        intermediate_size=int(layer["intermediate_size"]),
        rope=read_rope(layer),
        norm_eps=float(layer["rms_norm_eps"]),
        vocab_size=vocab,
        draft_vocab_size=facts.draft_vocab_size or vocab,
        max_positions=int(layer.get("max_position_embeddings", 4096)),
        attention_bias=bool(layer.get("attention_bias", False)),
        embedding_scale=facts.embedding_scale,
        output_multiplier=facts.output_multiplier,
        softcap=facts.softcap,
        convolution=facts.convolution,
        selector=facts.selector,
        markov=facts.markov,
        confidence=facts.confidence,
        notes=facts.notes,
    )


def layer_masks(
    layer: Json, causal: bool | None, sliding_causal: bool, from_anchor: bool = False
) -> tuple[LayerMask, ...]:
    """One mask a layer. causal: asked of every layer where given; else full layers see the whole
    block and sliding ones are causal when `sliding_causal`."""
    count = int(layer["num_hidden_layers"])
    types = tuple(layer.get("layer_types") or ("full_attention",) * count)
    if len(types) != count or set(types) - set(_LAYER_TYPES):
        raise CheckpointError(
            f"layer_types must name {count} layers of {', '.join(_LAYER_TYPES)}, not {types}"
        )
    masks: list[LayerMask] = []
    for kind in types:
        if kind != SLIDING:
            masks.append(LayerMask(causal=bool(causal)))
            continue
        window = layer.get("sliding_window")
        if not window:
            raise CheckpointError("sliding_attention layers need sliding_window")
        is_causal = sliding_causal if causal is None else causal
        masks.append(LayerMask(is_causal, int(window), from_anchor))
    return tuple(masks)


def default_aux_layers(num_target_layers: int | None, num_layers: int) -> tuple[int, ...]:
    """The public default: evenly spread from layer 1 to the third last (`dflash.md` 1.1)."""
    if num_target_layers is None:
        raise CheckpointError("target_layer_ids is missing, and the target's depth is unknown")
    if num_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_layers - 1)
    # Python rounds halves to even, as the public code does.
    return tuple(round(first + index * step) for index in range(num_layers))


def read_markov(fields: Json) -> Markov | None:
    """The serial head; None where its rank is 0 or absent."""
    rank = int(fields.get("markov_rank") or 0)
    if not rank:
        return None
    kind = str(fields.get("markov_head_type", "vanilla"))
    if kind not in set(MarkovKind):
        raise CheckpointError(
            f"markov_head_type {kind!r} is not supported, only {', '.join(MarkovKind)}"
        )
    return Markov(MarkovKind(kind), rank)


def read_confidence(fields: Json) -> ConfidenceInput | None:
    """The confidence head; None where it is switched off."""
    if not fields.get("enable_confidence_head", False):
        return None
    if fields.get("confidence_head_with_markov", False):
        return ConfidenceInput.HIDDEN_AND_TOKEN
    return ConfidenceInput.HIDDEN


def read_convolution(fields: Json) -> Convolution | None:
    """The convolutions of DFlash 2; None where no kernel size is given."""
    taps = int(fields.get("conv_kernel_size") or 0)
    return Convolution(taps, int(fields.get("conv_group_size") or 16)) if taps else None


def read_selector(fields: Json) -> Selector | None:
    """The path selector of DFlash 2; None where no rank is given."""
    rank = int(fields.get("selector_rank") or 0)
    return Selector(rank, int(fields.get("selector_top_k") or 16)) if rank else None


def ids_of(values: Sequence[int] | None) -> tuple[int, ...] | None:
    """Layer ids as integers; None where there are none."""
    return tuple(int(value) for value in values) if values else None


def _check_projection(
    tensors: Mapping[str, TensorInfo], aux_layers: tuple[int, ...], target_hidden: int, hidden: int
) -> None:
    shapes = {name.removeprefix("model."): info.shape for name, info in tensors.items()}
    expected = (hidden, len(aux_layers) * target_hidden)
    if shapes.get("fc.weight") != expected:
        raise CheckpointError(
            f"fc.weight of shape {shapes.get('fc.weight')} does not take {len(aux_layers)} aux "
            f"layers {aux_layers} of width {target_hidden}: expected {expected}"
        )


def _refuse_unsupported(layer: Json) -> None:
    refused = {
        f"model_type {layer.get('model_type')!r}": layer.get("model_type", "qwen3") != "qwen3",
        f"hidden_act {layer.get('hidden_act')!r}": layer.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(layer.get("mlp_bias")),
        "interleaved rotary positions": not layer.get("is_neox_style", True)
        or not layer.get("rope_is_neox_style", True),
        "partial rotary positions": float(layer.get("partial_rotary_factor") or 1.0) != 1.0,
    }
    refused |= {name: bool(layer.get(name)) for name in _UNSUPPORTED}
    for name, found in refused.items():
        if found:
            raise CheckpointError(f"a block drafter with {name} is not supported")

"""Which tensors an EAGLE-3 checkpoint must, may and must not have, and their names in our head.

Torch-free. Public layouts differ in a prefix only: `midlayer.` (SafeAILab, SpecForge) or
`layers.0.` (speculators, Model-Optimizer), all of it perhaps under `model.`. Invariant: a tensor
nobody asked for is an error, because ignoring a norm or a second layer changes every draft.
"""

from collections.abc import Mapping

from drafter_service.checkpoint.safetensors_header import TensorInfo
from drafter_service.eagle3.config import Eagle3Config
from protos.errors import CheckpointError

LAYER_PREFIXES = ("midlayer.", "layers.0.")
_LAYER_NAMES = {
    "hidden_norm": "hidden_norm",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "o_proj",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
}
_ALWAYS = ("embed_tokens.weight", "fc.weight", "lm_head.weight", "norm.weight")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def layer_prefix(tensors: Mapping[str, TensorInfo]) -> str:
    """The prefix of the one decoder layer, `model.` stripped. Several layers are refused."""
    names = [name.removeprefix("model.") for name in tensors]
    found = [prefix for prefix in LAYER_PREFIXES if any(n.startswith(prefix) for n in names)]
    if len(found) != 1:
        raise CheckpointError(f"expected tensors under one of {LAYER_PREFIXES}, found {found}")
    extra = sorted({n.split(".")[1] for n in names if n.startswith("layers.")} - {"0"})
    if extra:
        raise CheckpointError(f"EAGLE-3 heads of several layers are not supported: layers {extra}")
    return found[0]


def tensor_names(config: Eagle3Config, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """{parameter of Eagle3Head: tensor of the file}, all shapes checked.

    `embed_tokens.weight` is left out when the file has none: the head then shares the target's.
    Raises CheckpointError naming every tensor missing or unknown, or the first wrong shape.
    """
    prefix = layer_prefix(tensors)
    full = {name.removeprefix("model."): name for name in tensors}
    wanted = public_names(config, prefix)
    if "embed_tokens.weight" not in full:
        wanted.pop("embed_tokens.weight")
    missing = sorted(source for source in wanted.values() if source not in full)
    unknown = sorted(set(full) - set(wanted.values()) - {"d2t", "t2d"})
    if missing or unknown:
        raise CheckpointError(f"EAGLE-3 tensors missing: {missing}, unknown: {unknown}")
    shapes = _shapes(config)
    for parameter, source in wanted.items():
        got = tensors[full[source]].shape
        if got != shapes[parameter]:
            raise CheckpointError(f"{source}: expected shape {shapes[parameter]}, got {got}")
    return {parameter: full[source] for parameter, source in wanted.items()}


def public_names(config: Eagle3Config, prefix: str) -> dict[str, str]:
    """{parameter of Eagle3Head: its name in public checkpoints with this layer prefix}."""
    names = {name: name for name in _ALWAYS}
    if config.fc_bias:
        names["fc.bias"] = "fc.bias"
    if config.norm_before_fc:
        names["input_norm.weight"] = "input_norm.weight"
    if config.fc_norm:
        for aux in range(config.num_aux):
            names[f"fc_norm.{aux}.weight"] = f"fc_norm.{aux}.weight"
    for public, ours in _LAYER_NAMES.items():
        names[f"layer.{ours}.weight"] = f"{prefix}{public}.weight"
        if config.attention_bias and ours in _ATTENTION:
            names[f"layer.{ours}.bias"] = f"{prefix}{public}.bias"
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            names[f"layer.{norm}.weight"] = f"{prefix}self_attn.{norm}.weight"
    return names


def _shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    c, wide, inter = config.hidden_size, 2 * config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, c),
        "fc.weight": (c, config.feature_size),
        "fc.bias": (c,),
        "lm_head.weight": (config.draft_vocab_size, c),
        "norm.weight": (c,),
        "input_norm.weight": (config.feature_size,),
        "layer.q_proj.weight": (q_size, wide),
        "layer.k_proj.weight": (kv_size, wide),
        "layer.v_proj.weight": (kv_size, wide),
        "layer.o_proj.weight": (c, q_size),
        "layer.q_proj.bias": (q_size,),
        "layer.k_proj.bias": (kv_size,),
        "layer.v_proj.bias": (kv_size,),
        "layer.o_proj.bias": (c,),
        "layer.q_norm.weight": (config.head_dim,),
        "layer.k_norm.weight": (config.head_dim,),
        "layer.gate_proj.weight": (inter, c),
        "layer.up_proj.weight": (inter, c),
        "layer.down_proj.weight": (c, inter),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"layer.{norm}.weight"] = (c,)
    for aux in range(config.num_aux):
        shapes[f"fc_norm.{aux}.weight"] = (config.target_hidden_size,)
    return shapes

"""Which tensors an EAGLE-3 checkpoint must, may and must not have, and their names in our head.

Torch-free. Public layouts differ in a prefix only: `midlayer.` (SafeAILab, SpecForge) or
`layers.0.` (speculators, Model-Optimizer), all of it perhaps under `model.`. Invariant: a tensor
nobody asked for is an error, because ignoring a norm or a second layer changes every draft.
"""

from collections.abc import Mapping

from drafter_service.checkpoint.safetensors_header import TensorInfo
from drafter_service.eagle3.config import Eagle3Config, LayerFacts
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
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
}
_OPTIONAL = ("embed_tokens.weight", "lm_head.weight")
Shape = tuple[int, ...]


def layer_prefix(tensors: Mapping[str, TensorInfo]) -> str:
    """The prefix of the first decoder layer, `model.` stripped."""
    names = [name.removeprefix("model.") for name in tensors]
    found = [prefix for prefix in LAYER_PREFIXES if any(n.startswith(prefix) for n in names)]
    if len(found) != 1:
        raise CheckpointError(f"expected tensors under one of {LAYER_PREFIXES}, found {found}")
    return found[0]


def tensor_names(config: Eagle3Config, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """{parameter of Eagle3Head: tensor of the file}, all shapes checked.

    `embed_tokens.weight` and a full vocabulary's `lm_head.weight` are left out when the file has
    none: the head then shares the target's. Raises CheckpointError naming every tensor missing or
    unknown, the first wrong shape, or both widths where nothing can be shared.
    """
    wanted = public_names(config, layer_prefix(tensors))
    names = match_names("EAGLE-3", wanted, _shapes(config), tensors, _may_borrow(config))
    borrowed = [name for name in _OPTIONAL if name not in names]
    if borrowed and config.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"a head of width {config.hidden_size} cannot share {', '.join(borrowed)} with a "
            f"target of width {config.target_hidden_size}"
        )
    return names


def match_names(
    family: str,
    wanted: Mapping[str, str],
    shapes: Mapping[str, Shape],
    tensors: Mapping[str, TensorInfo],
    optional: tuple[str, ...] = (),
) -> dict[str, str]:
    """{parameter: tensor of the file} for {parameter: public name}, optional ones where present.

    Raises CheckpointError naming what is missing, unknown, twice there, or of the wrong shape.
    """
    full = {name.removeprefix("model."): name for name in tensors}
    if len(full) != len(tensors):
        twice = sorted(set(tensors) - set(full.values()))
        raise CheckpointError(f"{family} tensors with and without `model.`: {twice}")
    expected = {ours: name for ours, name in wanted.items() if ours not in optional or name in full}
    missing = sorted(name for name in expected.values() if name not in full)
    unknown = sorted(set(full) - set(expected.values()) - {"d2t", "t2d"})
    if missing or unknown:
        raise CheckpointError(f"{family} tensors missing: {missing}, unknown: {unknown}")
    for ours, name in expected.items():
        got = tensors[full[name]].shape
        # Some projects keep leading axes of 1 on vectors.
        if got != shapes[ours] and (len(shapes[ours]) > 1 or _squeezed(got) != shapes[ours]):
            raise CheckpointError(f"{name}: expected shape {shapes[ours]}, got {got}")
    return {ours: full[name] for ours, name in expected.items()}


def public_names(config: Eagle3Config, prefix: str) -> dict[str, str]:
    """{parameter of Eagle3Head: its name in public checkpoints with this layer prefix}."""
    own = ["embed_tokens.weight", "lm_head.weight", "norm.weight"]
    own += ["fc.weight"] if config.has_fc else []
    own += ["fc.bias"] if config.fc_bias else []
    own += ["input_norm.weight"] if config.norm_before_fc else []
    own += ["mask_hidden"] if config.mask_token_id is not None else []
    if config.fc_norm:
        own += [f"fc_norm.{aux}.weight" for aux in range(config.num_aux)]
    names = {name: name for name in own}
    for number in range(config.num_layers):
        place = prefix if number == 0 else f"layers.{number}."
        for ours, public in layer_names(_layer_shapes(config, number)).items():
            names[f"{_place(number)}{ours}"] = f"{place}{public}"
    return names


def layer_names(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """{parameter of a DraftLayer: its public name within a layer}."""
    public = {ours: name for name, ours in _LAYER_NAMES.items()}
    found = {}
    for parameter in shapes:
        module, _, kind = parameter.partition(".")
        found[parameter] = f"{public[module]}.{kind}"
    return found


def layer_shapes(
    facts: LayerFacts, doubled: bool = False, input_norm: bool = True
) -> dict[str, Shape]:
    """{parameter of a DraftLayer: its shape}."""
    c, inter, dim = facts.hidden_size, facts.intermediate_size, facts.head_dim
    wide = 2 * c if doubled else c
    q_size, kv_size = facts.num_heads * dim, facts.num_kv_heads * dim
    linears = {
        "q_proj": ((q_size, wide), facts.attention_bias or facts.qkv_bias),
        "k_proj": ((kv_size, wide), facts.attention_bias or facts.qkv_bias),
        "v_proj": ((kv_size, wide), facts.attention_bias or facts.qkv_bias),
        "o_proj": ((c, q_size), facts.attention_bias),
        "gate_proj": ((inter, c), facts.mlp_bias),
        "up_proj": ((inter, c), facts.mlp_bias),
        "down_proj": ((c, inter), facts.mlp_bias),
    }
    norms = {"post_attention_layernorm": c}
    norms |= {"input_layernorm": c} if input_norm else {}
    norms |= {"hidden_norm": c} if doubled else {}
    norms |= {"q_norm": dim, "k_norm": dim} if facts.qk_norm else {}
    shapes: dict[str, Shape] = {f"{norm}.weight": (width,) for norm, width in norms.items()}
    for name, (shape, has_bias) in linears.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _layer_shapes(config: Eagle3Config, number: int) -> dict[str, Shape]:
    return layer_shapes(config.layer_facts, number == 0 or config.doubled_layers)


def _place(number: int) -> str:
    return "layer." if number == 0 else f"later.{number - 1}."


def _may_borrow(config: Eagle3Config) -> tuple[str, ...]:
    full = config.draft_vocab_size == config.vocab_size
    return _OPTIONAL if full else ("embed_tokens.weight",)


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _shapes(config: Eagle3Config) -> dict[str, Shape]:
    c = config.hidden_size
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab_size, c),
        "lm_head.weight": (config.draft_vocab_size, c),
        "norm.weight": (c,),
        "fc.weight": (c, config.feature_size),
        "fc.bias": (c,),
        "input_norm.weight": (config.feature_size,),
        "mask_hidden": (config.feature_size,),
    }
    for aux in range(config.num_aux):
        shapes[f"fc_norm.{aux}.weight"] = (config.target_hidden_size,)
    for number in range(config.num_layers):
        for ours, shape in _layer_shapes(config, number).items():
            shapes[f"{_place(number)}{ours}"] = shape
    return shapes

"""Which tensors a block drafter's checkpoint must, may and must not have. Torch-free.

Our net bears the public names, so a parameter is called what its tensor is called; only a leading
`model.` may differ. Invariant: a tensor nobody asked for is an error, because ignoring a norm or a
head changes every draft.
"""

from collections.abc import Mapping

from drafter_service.checkpoint.safetensors_header import TensorInfo
from drafter_service.dflash.config import BlockConfig, ConfidenceInput, MarkovKind
from protos.errors import CheckpointError

BORROWED = ("embed_tokens.weight", "lm_head.weight")
"""Taken from the target when the file has none."""

_MAPS = {"d2t", "t2d"}
_INV_FREQ = "rotary_emb.inv_freq"


def tensor_names(config: BlockConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """{parameter of BlockNet: tensor of the file}, all shapes checked; borrowed ones left out.

    Raises CheckpointError naming every tensor missing or unknown, or the first wrong shape.
    """
    full = {name.removeprefix("model."): name for name in tensors}
    shapes = parameter_shapes(config)
    if config.draft_vocab_size != config.vocab_size and "lm_head.weight" not in full:
        raise CheckpointError(
            f"lm_head.weight is missing: a draft vocabulary of {config.draft_vocab_size} cannot "
            f"use the target's"
        )
    given = [name for name in shapes if name not in BORROWED or name in full]
    missing = sorted(name for name in given if name not in full)
    unknown = sorted(
        name for name in set(full) - set(shapes) - _MAPS if not name.endswith(_INV_FREQ)
    )
    if missing or unknown:
        raise CheckpointError(f"block drafter's tensors missing: {missing}, unknown: {unknown}")
    for name in given:
        got = tensors[full[name]].shape
        if got != shapes[name]:
            raise CheckpointError(f"{name}: expected shape {shapes[name]}, got {got}")
    return {name: full[name] for name in given}


def check_maps(config: BlockConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError when a reduced vocabulary has no map or one of another size."""
    maps = {name.removeprefix("model."): info for name, info in tensors.items()}
    if config.draft_vocab_size != config.vocab_size and "d2t" not in maps:
        raise CheckpointError(
            f"draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size} without d2t"
        )
    for name, size in (("d2t", config.draft_vocab_size), ("t2d", config.vocab_size)):
        if name in maps and maps[name].shape != (size,):
            raise CheckpointError(f"{name}: expected shape ({size},), got {maps[name].shape}")


def parameter_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of a net with this config."""
    c = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, c),
        "lm_head.weight": (config.draft_vocab_size, c),
        "fc.weight": (c, config.feature_size),
        "hidden_norm.weight": (c,),
        "norm.weight": (c,),
    }
    for index in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"layers.{index}.{name}"] = shape
    return shapes | _head_shapes(config)


def _layer_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    c, dim, inter = config.hidden_size, config.head_dim, config.intermediate_size
    widths = {
        "q_proj": config.num_heads * dim,
        "k_proj": config.num_kv_heads * dim,
        "v_proj": config.num_kv_heads * dim,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c,),
        "post_attention_layernorm.weight": (c,),
        "self_attn.o_proj.weight": (c, config.num_heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (inter, c),
        "mlp.up_proj.weight": (inter, c),
        "mlp.down_proj.weight": (c, inter),
    }
    for name, width in widths.items():
        shapes[f"self_attn.{name}.weight"] = (width, c)
    if config.attention_bias:
        for name, width in (*widths.items(), ("o_proj", c)):
            shapes[f"self_attn.{name}.bias"] = (width,)
    conv = config.convolution
    if conv is not None:
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, conv.taps, c)
            shapes[f"{name}.kernel_projection.weight"] = (2 * conv.taps * (c // conv.group_size), c)
    return shapes


def _head_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    c, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.selector is not None:
        rank = config.selector.rank
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (vocab, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, c)
    rank = 0
    if config.markov is not None:
        rank = config.markov.rank
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        if config.markov.kind is MarkovKind.GATED:
            shapes["markov_head.gate_proj.weight"] = (rank, c + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if config.markov.kind is MarkovKind.RNN:
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + c)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence is not None:
        extra = rank if config.confidence is ConfidenceInput.HIDDEN_AND_TOKEN else 0
        shapes["confidence_head.proj.weight"] = (1, c + extra)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes

"""How a new block drafter begins. Its embedding and lm_head are the target's, frozen.

fc starts as the identity on the deepest aux feature, and the norm behind it, where it can, as the
input norm of the target's layer that reads that feature: so context keys and values of the first
layer begin as the target's own. Layers start as small random numbers or as the target's last ones,
whose shapes a Qwen3 layer shares but for the norms on queries and keys. Knows no data.

Shapes: V target vocabulary, C hidden size (the target's too).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_service.checkpoint.block_reader import read_block_net
from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.target import TargetWeights
from drafter_service.dflash.config import BlockConfig, ConfidenceInput, LayerMask, Layout, Markov
from drafter_service.dflash.net import BlockNet
from drafter_service.training.block_settings import BlockHeadSettings
from drafter_service.training.first_weights import (
    FINAL_GAIN,
    FROZEN,
    check_aux_layers,
    fill_identity,
    fill_small,
    target_matrices,
    target_rope,
)
from drafter_service.training.norms import with_trained_norms
from drafter_service.training.target_layers import read_target_layers
from protos.errors import ConfigError


def block_config(
    settings: BlockHeadSettings,
    target: Mapping[str, Any],
    layout: Layout,
    markov: Markov | None = None,
    confidence: ConfidenceInput | None = None,
) -> BlockConfig:
    """The drafter's shape: sizes, rope, eps of the target's config.json, the rest of settings."""
    hidden, vocab = int(target["hidden_size"]), int(target["vocab_size"])
    check_aux_layers(settings.aux_layers, target)
    reserved = {target.get("eos_token_id"), target.get("pad_token_id")}
    if settings.mask_id >= vocab or settings.mask_id in reserved:
        raise ConfigError(
            f"mask_id {settings.mask_id} must be an embedding's row ({vocab} rows) and neither the "
            f"end of text nor padding {sorted(map(str, reserved))}"
        )
    return BlockConfig(
        layout=layout,
        block_size=settings.block_size,
        mask_id=settings.mask_id,
        hidden_size=hidden,
        target_hidden_size=hidden,
        aux_layers=settings.aux_layers,
        masks=(LayerMask(),) * settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        intermediate_size=settings.intermediate_size,
        rope=target_rope(target),
        norm_eps=float(target["rms_norm_eps"]),
        vocab_size=vocab,
        draft_vocab_size=vocab,
        max_positions=int(target["max_position_embeddings"]),
        markov=markov,
        confidence=confidence,
    )


@torch.no_grad()
def new_block_net(config: BlockConfig, target: TargetWeights, seed: int) -> BlockNet:
    """A float32 net ready to be trained, its layers small random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        net = BlockNet(config)
    net = net.to_empty(device="cpu")
    net.target_ids = torch.arange(config.vocab_size)
    net.reset_frequencies()
    fill_small(net, generator)
    fill_identity(net.fc, config.hidden_size, generator)
    net.embed_tokens.weight, net.lm_head.weight = target_matrices(target)
    if target.final_norm is not None:
        net.norm.weight.copy_(target.final_norm * FINAL_GAIN)
    with_trained_norms(net)
    return net


@torch.no_grad()
def copy_target_layers(net: BlockNet, directory: Path) -> None:
    """Layers start as the target's last ones, hidden_norm as the first of theirs.

    Raises ConfigError when the target has no layers of that name and shape.
    """
    layers = read_target_layers(directory, net.config.num_layers)
    for name, parameter in net.named_parameters():
        if not name.startswith("layers.") or "q_norm" in name or "k_norm" in name:
            continue
        _, number, rest = name.split(".", 2)
        weight = layers[int(number)].get(rest)
        if weight is None or weight.shape != parameter.shape:
            raise ConfigError(
                f"start: target_layers needs the target's {rest} of shape "
                f"{tuple(parameter.shape)} in its last layers; use start: random"
            )
        parameter.copy_(weight)
    net.hidden_norm.weight.copy_(layers[0]["input_layernorm.weight"])


def inherited_block(checkpoint: Path, target: TargetWeights, new: BlockNet) -> dict[str, Tensor]:
    """float32 weights for every trained parameter of `new`, of an exported checkpoint.

    Raises ConfigError when it is of another shape.
    """
    described = describe(checkpoint)
    if described.config != new.config:
        raise ConfigError(
            f"the checkpoint to start from is another drafter: {described.config}, not {new.config}"
        )
    old = read_block_net(checkpoint, described, target.embed_tokens, target.lm_head, torch.float32)
    return {name: p.detach().clone() for name, p in old.named_parameters() if name not in FROZEN}

"""How a new head begins: shared rows from the target, small random numbers elsewhere.

The embedding is the target's, frozen. The draft lm_head starts as the target's rows times its
final-norm weight, under a final norm of small gain, so the first predictions are soft but lie in
the target's own directions. fc starts as the identity on the deepest aux feature. Knows no files.

Shapes: V target vocabulary, H target hidden size, W draft vocabulary, C head hidden size.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafter_service.checkpoint.target import TargetWeights
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.eagle3_settings import HeadSettings
from drafter_service.training.first_weights import (
    FC_NOISE,
    FINAL_GAIN,
    check_aux_layers,
    target_rope,
)
from drafter_service.training.target_layers import read_target_layers
from protos.errors import ConfigError

EMBEDDING_SHARE = 0.1
_OURS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    **{f"self_attn.{name}_proj.weight": f"{name}_proj.weight" for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": f"{name}_proj.weight" for name in ("gate", "up", "down")},
}
"""Parameters of a target's layer and what they are called in a draft layer."""


@torch.no_grad()
def new_head(
    config: Eagle3Config, target: TargetWeights, target_ids_W: Tensor, seed: int
) -> Eagle3Head:
    """A float32 head ready to be trained; `target_ids_W` are the kept ids, ascending."""
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config, target_ids_W)
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2 and not name.startswith(("embed_tokens", "lm_head", "fc.")):
            bound = parameter.shape[1] ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
    assert head.fc is not None  # heads without it are read, never trained
    head.fc.weight.normal_(0.0, FC_NOISE, generator=generator)
    size = config.target_hidden_size
    if size == config.hidden_size:
        head.fc.weight[:, -size:] += torch.eye(size)
    for layer in head.layers:
        layer.o_proj.weight.mul_(0.5)
        layer.down_proj.weight.mul_(0.5)
    head.embed_tokens.weight.copy_(target.embed_tokens)
    rows_WH = target.lm_head[target_ids_W].float()
    if target.final_norm is not None:
        rows_WH = rows_WH * target.final_norm.float()
    head.lm_head.weight.copy_(rows_WH)
    nn.init.constant_(head.norm.weight, FINAL_GAIN)
    head.embed_tokens.weight.requires_grad_(False)
    return head


@torch.no_grad()
def copy_target_layers(head: Eagle3Head, directory: Path) -> None:
    """Layers start as the target's last ones.

    The first one's q, k and v take (embedding, hidden) where the target's take the hidden alone:
    the target's go to the half of the hidden, the other half keeps its random numbers, made small,
    and the norm on the hidden is the target's input norm. Raises ConfigError when the target has
    no layers of that name and shape.
    """
    shapes = read_target_layers(directory, len(head.layers))
    for layer, weights in zip(head.layers, shapes, strict=True):
        for public, weight in weights.items():
            ours = _OURS.get(public)
            if ours is None:
                raise ConfigError(f"start: target_layers: the target's layers have {public}")
            if layer.hidden_norm is not None and ours == "input_layernorm.weight":
                ours = "hidden_norm.weight"
            parameter = layer.get_parameter(ours)
            into: Tensor = parameter
            if layer.hidden_norm is not None and ours[:2] in ("q_", "k_", "v_"):
                size = parameter.shape[1] // 2
                parameter[:, :size].mul_(EMBEDDING_SHARE)
                into = parameter[:, size:]
            if into.shape != weight.shape:
                raise ConfigError(
                    f"start: target_layers: {public} is {tuple(weight.shape)} in the target, the "
                    f"head has room for {tuple(into.shape)}; use start: random"
                )
            into.copy_(weight)


@torch.no_grad()
def inherited_weights(old: Eagle3Head, new: Eagle3Head) -> dict[str, Tensor]:
    """float32 weights for `new`, a fresh head: those of `old`, whose draft vocabulary may differ.

    Rows of lm_head follow their target ids. An id that `old` did not draft gets its fresh row (the
    target's), each channel scaled as training has scaled it in the rows that both heads have.
    Raises ConfigError when anything but the vocabulary differs.
    """
    same = replace(old.config, draft_vocab_size=new.config.draft_vocab_size)
    if same != replace(new.config, max_positions=same.max_positions):
        raise ConfigError("the checkpoint to start from is a head of another shape")
    weights = {name: p.detach().float().clone() for name, p in old.named_parameters()}
    place = {int(target): row for row, target in enumerate(old.target_ids.tolist())}
    rows_W = torch.tensor([place.get(int(target), -1) for target in new.target_ids.tolist()])
    fresh_WC, shared_W = new.lm_head.weight.detach().float(), rows_W >= 0
    trained_SC, first_SC = weights["lm_head.weight"][rows_W[shared_W]], fresh_WC[shared_W]
    scale_C = (trained_SC * first_SC).sum(0) / first_SC.square().sum(0).clamp_min(1e-12)
    lm_head_WC = fresh_WC * scale_C
    lm_head_WC[shared_W] = trained_SC
    return weights | {"lm_head.weight": lm_head_WC}


def head_config(settings: HeadSettings, target: Mapping[str, Any]) -> Eagle3Config:
    """The head's shape: sizes, rope and eps of the target's config.json, the rest of settings."""
    hidden, vocab = int(target["hidden_size"]), int(target["vocab_size"])
    check_aux_layers(settings.aux_layers, target)
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=hidden,
        aux_layers=settings.aux_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=int(target.get("head_dim") or hidden // settings.num_heads),
        intermediate_size=settings.intermediate_size,
        rope=target_rope(target),
        norm_eps=float(target["rms_norm_eps"]),
        vocab_size=vocab,
        draft_vocab_size=settings.draft_vocab_size,
        max_positions=int(target["max_position_embeddings"]),
        norm_before_residual=settings.norm_before_residual,
        fc_norm=settings.fc_norm,
        norm_feedback=settings.norm_feedback,
        num_layers=settings.num_layers,
        windows=(None,) * settings.num_layers,
    )

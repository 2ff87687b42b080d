"""How a new EAGLE-1 head begins, or goes on. Embedding and lm_head are the target's, frozen.

fc starts as the identity on the feature, so the first guess of the next state is the last one.
Knows no data.

Shapes: V target vocabulary, C hidden size (the target's too).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights
from drafter_service.checkpoint.eagle_reader import eagle_head_of
from drafter_service.checkpoint.target import TargetWeights
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle3.config import LayerFacts, Rope
from drafter_service.training.eagle_settings import EagleHeadSettings
from protos.errors import ConfigError

FC_NOISE = 0.02
FROZEN = ("embed_tokens.weight", "lm_head.weight")


def eagle_config(settings: EagleHeadSettings, target: Mapping[str, Any]) -> EagleConfig:
    """Sizes, rope and eps of the target's config.json, the rest of settings.

    A scaled rope of the target is not copied: recorded answers are far shorter than its context.
    """
    hidden = int(target["hidden_size"])
    rope = target.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or target.get("rope_theta") or 10000.0
    layer = LayerFacts(
        hidden_size=hidden,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=int(target.get("head_dim") or hidden // settings.num_heads),
        intermediate_size=settings.intermediate_size,
        norm_eps=float(target["rms_norm_eps"]),
    )
    return EagleConfig(
        layer=layer,
        rope=Rope(theta=float(theta)),
        vocab_size=int(target["vocab_size"]),
        max_positions=int(target["max_position_embeddings"]),
        num_layers=settings.num_layers,
        fc_bias=settings.fc_bias,
    )


@torch.no_grad()
def new_eagle_head(config: EagleConfig, target: TargetWeights, seed: int) -> EagleHead:
    """A float32 head ready to be trained, its layers small random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        head = EagleHead(config)
    head = head.to_empty(device="cpu")
    head.reset_frequencies()
    for name, parameter in head.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name not in FROZEN:
            bound = parameter.shape[1] ** -0.5
            small = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.uniform_(-bound * small, bound * small, generator=generator)
    size = config.hidden_size
    head.fc.weight.normal_(0.0, FC_NOISE, generator=generator)
    head.fc.weight[:, size:] += torch.eye(size)
    head.embed_tokens.weight = nn.Parameter(target.embed_tokens.float(), requires_grad=False)
    head.lm_head.weight = nn.Parameter(target.lm_head.float(), requires_grad=False)
    return head


def inherited_eagle(
    checkpoint: Path, target: TargetWeights, config: EagleConfig
) -> dict[str, Tensor]:
    """float32 weights of an exported head of the same shape, without what is the target's.

    Raises CheckpointError, or ConfigError when the head is another one.
    """
    described = describe(checkpoint)
    if described.kind != "eagle":
        raise ConfigError(f"the checkpoint to start from is of kind {described.kind}, not eagle")
    shared = SharedWeights(target.embed_tokens, target.lm_head)
    head = eagle_head_of(described, checkpoint, shared, torch.float32)
    if head.config != replace(config, max_positions=head.config.max_positions):
        raise ConfigError("the checkpoint to start from is a head of another shape")
    return {name: p.detach() for name, p in head.named_parameters() if name not in FROZEN}

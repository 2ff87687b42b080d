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
from torch import Tensor

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights
from drafter_service.checkpoint.eagle_reader import eagle_head_of
from drafter_service.checkpoint.target import TargetWeights
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle3.config import LayerFacts
from drafter_service.training.eagle_settings import EagleHeadSettings
from drafter_service.training.first_weights import (
    FROZEN,
    fill_identity,
    fill_small,
    target_matrices,
    target_rope,
)
from protos.errors import ConfigError


def eagle_config(settings: EagleHeadSettings, target: Mapping[str, Any]) -> EagleConfig:
    """Sizes, rope and eps of the target's config.json, the rest of settings."""
    hidden = int(target["hidden_size"])
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
        rope=target_rope(target),
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
    fill_small(head, generator)
    fill_identity(head.fc, config.hidden_size, generator)
    head.embed_tokens.weight, head.lm_head.weight = target_matrices(target)
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

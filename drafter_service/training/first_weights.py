"""What every new drafter begins with: small random numbers, the target's own matrices and rope.

Knows no family.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from drafter_service.checkpoint.target import TargetWeights
from drafter_service.eagle3.config import Rope
from protos.errors import ConfigError

FINAL_GAIN: Final = 0.3
FC_NOISE: Final = 0.02
FROZEN: Final = ("embed_tokens.weight", "lm_head.weight")
"""What block drafters and EAGLE-1 heads share with the target and never train."""


@torch.no_grad()
def fill_small(net: nn.Module, generator: torch.Generator) -> None:
    """Norms 1, biases 0, matrices uniform within the inverse root of their inputs; FROZEN stay.

    What is added to the residual stream begins at half of that.
    """
    for name, parameter in net.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name not in FROZEN:
            bound = parameter.shape[1] ** -0.5
            small = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.uniform_(-bound * small, bound * small, generator=generator)


@torch.no_grad()
def fill_identity(fc: nn.Linear, size: int, generator: torch.Generator) -> None:
    """The last `size` inputs pass; the others are little noise."""
    fc.weight.normal_(0.0, FC_NOISE, generator=generator)
    fc.weight[:, -size:] += torch.eye(size)


def target_matrices(target: TargetWeights) -> tuple[nn.Parameter, nn.Parameter]:
    """The target's embedding and lm_head in float32, never trained."""
    matrices = (target.embed_tokens, target.lm_head)
    embedding, head = (nn.Parameter(one.float(), requires_grad=False) for one in matrices)
    return embedding, head


def target_rope(target: Mapping[str, Any]) -> Rope:
    """The rope of the target's config.json.

    A scaled one is not copied: recorded answers are far shorter than the target's context.
    """
    rope = target.get("rope_parameters") or {}
    return Rope(theta=float(rope.get("rope_theta") or target.get("rope_theta") or 10000.0))


def check_aux_layers(layers: tuple[int, ...], target: Mapping[str, Any]) -> None:
    """Raise ConfigError where the target has no such layer."""
    if max(layers) >= int(target["num_hidden_layers"]):
        raise ConfigError(f"aux layers {layers} in a target of fewer layers")

"""A block drafter's checkpoint as a net ready to draft.

Reads safetensors only. Invariant: every parameter of the net is either in the file or the
target's; nothing stays at its random start.

Shapes: V target vocabulary, W draft vocabulary, C hidden size.
"""

from pathlib import Path

import torch
from torch import Tensor

from drafter_service.checkpoint.description import CheckpointDescription
from drafter_service.checkpoint.tensors import read_target_ids, read_tensor
from drafter_service.dflash.config import BlockConfig
from drafter_service.dflash.net import BlockNet
from protos.errors import CheckpointError


def read_block_net(
    directory: Path,
    described: CheckpointDescription[BlockConfig],
    target_embed_tokens: Tensor | None = None,
    target_lm_head: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> BlockNet:
    """The net in `dtype`, in eval mode, without gradients.

    The target's [V, C] are used where the file has none of its own. Raises CheckpointError when
    neither has, when the vocabulary maps contradict each other, or a weight is not a float.
    """
    config = described.config
    # On the meta device first: the parameters are replaced, never initialised.
    with torch.device("meta"):
        net = BlockNet(config)
    weights = {
        ours: read_tensor(directory, described, name) for ours, name in described.names.items()
    }
    if not described.own_embedding:
        weights["embed_tokens.weight"] = _borrow("embed_tokens", config, target_embed_tokens)
    if not described.own_lm_head:
        weights["lm_head.weight"] = _borrow("lm_head", config, target_lm_head)
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise CheckpointError(f"{name}: expected floating point, got {weight.dtype}")
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    net.load_state_dict(cast, strict=True, assign=True)
    net.target_ids = read_target_ids(directory, described)
    net.reset_frequencies()
    return net.eval().requires_grad_(False)


def _borrow(name: str, config: BlockConfig, given_VC: Tensor | None) -> Tensor:
    if given_VC is None:
        raise CheckpointError(f"the checkpoint has no {name}.weight and no target's was given")
    expected = (config.vocab_size, config.hidden_size)
    if tuple(given_VC.shape) != expected:
        raise CheckpointError(f"the target's {name} is {tuple(given_VC.shape)}, not {expected}")
    return given_VC

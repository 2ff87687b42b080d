"""A block drafter's checkpoint as a net ready to draft.

Reads safetensors only. Invariant: every parameter of the net is either in the file or the
target's; nothing stays at its random start.

Shapes: V target vocabulary, W draft vocabulary, C hidden size.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_service.checkpoint.description import CheckpointDescription
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
    weights = {ours: _read(directory, described, name) for ours, name in described.names.items()}
    if not described.own_embedding:
        weights["embed_tokens.weight"] = _borrow("embed_tokens", config, target_embed_tokens)
    if not described.own_lm_head:
        weights["lm_head.weight"] = _borrow("lm_head", config, target_lm_head)
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise CheckpointError(f"{name}: expected floating point, got {weight.dtype}")
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    net.load_state_dict(cast, strict=True, assign=True)
    net.target_ids = _target_ids(directory, described)
    net.reset_frequencies()
    return net.eval().requires_grad_(False)


def _target_ids(directory: Path, described: CheckpointDescription[BlockConfig]) -> Tensor:
    """[W] target id of every draft id: i + d2t[i], or the identity; checked against t2d."""
    config = described.config
    ids_W = torch.arange(config.draft_vocab_size)
    names = {name.removeprefix("model."): name for name in described.tensors}
    if "d2t" in names:
        offsets_W = _read(directory, described, names["d2t"])
        if offsets_W.is_floating_point():
            raise CheckpointError(f"d2t: expected integers, got {offsets_W.dtype}")
        ids_W = ids_W + offsets_W.to(torch.int64)
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= config.vocab_size:
        raise CheckpointError(f"d2t leads outside the vocabulary of {config.vocab_size}")
    if len(set(ids_W.tolist())) != len(ids_W):
        raise CheckpointError("d2t maps two draft ids to one target id")
    if "t2d" in names:
        kept_V = _read(directory, described, names["t2d"]).to(torch.bool)
        expected_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        expected_V[ids_W] = True
        if not torch.equal(kept_V, expected_V):
            raise CheckpointError("t2d and d2t name different target ids")
    return ids_W


def _borrow(name: str, config: BlockConfig, given_VC: Tensor | None) -> Tensor:
    if given_VC is None:
        raise CheckpointError(f"the checkpoint has no {name}.weight and no target's was given")
    expected = (config.vocab_size, config.hidden_size)
    if tuple(given_VC.shape) != expected:
        raise CheckpointError(f"the target's {name} is {tuple(given_VC.shape)}, not {expected}")
    return given_VC


def _read(directory: Path, described: CheckpointDescription[BlockConfig], name: str) -> Tensor:
    with safe_open(directory / described.tensors[name].file, framework="pt") as stream:
        tensor: Tensor = stream.get_tensor(name)
    return tensor

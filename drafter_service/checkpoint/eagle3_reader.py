"""An EAGLE-3 checkpoint as a head ready to draft.

Reads safetensors only. Invariant: every parameter of the head is either in the file or shared
with the target; nothing stays at its random start.

Shapes: V target vocabulary, W draft vocabulary, C hidden size of the head.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.description import CheckpointDescription
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from protos.errors import CheckpointError


def read_eagle3_head(
    directory: Path,
    target_embedding_VC: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num_target_layers: int | None = None,
) -> Eagle3Head:
    """The head in `dtype`, in eval mode, without gradients.

    `target_embedding_VC` is used when the checkpoint has no embedding. Raises CheckpointError
    when neither has, when the vocabulary maps contradict each other, or a weight is not a float.
    """
    described = describe(directory, num_target_layers)
    config = described.config
    # On the meta device first: the parameters are replaced, never initialised.
    with torch.device("meta"):
        head = Eagle3Head(config)
    weights = {ours: _read(directory, described, name) for ours, name in described.names.items()}
    if not described.own_embedding:
        weights["embed_tokens.weight"] = _shared_embedding(
            config.vocab_size, config.hidden_size, target_embedding_VC
        )
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise CheckpointError(f"{name}: expected floating point, got {weight.dtype}")
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    head.load_state_dict(cast, strict=True, assign=True)
    head.target_ids = read_target_ids(directory, described)
    head.reset_frequencies()
    return head.eval().requires_grad_(False)


def read_target_ids(directory: Path, described: CheckpointDescription[Eagle3Config]) -> Tensor:
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


def _shared_embedding(vocab_size: int, hidden: int, target_VC: Tensor | None) -> Tensor:
    if target_VC is None:
        raise CheckpointError("the head has no embed_tokens.weight and no target's was given")
    if tuple(target_VC.shape) != (vocab_size, hidden):
        raise CheckpointError(
            f"target embedding {tuple(target_VC.shape)}, expected {(vocab_size, hidden)}"
        )
    return target_VC


def _read(directory: Path, described: CheckpointDescription[Eagle3Config], name: str) -> Tensor:
    with safe_open(directory / described.tensors[name].file, framework="pt") as stream:
        tensor: Tensor = stream.get_tensor(name)
    return tensor

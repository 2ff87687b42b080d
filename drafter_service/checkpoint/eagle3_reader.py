"""An EAGLE-3 checkpoint as a head ready to draft.

Reads safetensors only. Invariant: every parameter of the head is either in the file or shared
with the target; nothing stays at its random start.

Shapes: V target vocabulary, W draft vocabulary, C hidden size of the head.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.description import CheckpointDescription
from drafter_service.checkpoint.safetensors_header import read_json
from drafter_service.checkpoint.tensors import read_target_ids, read_tensor
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from protos.errors import CheckpointError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Weights in 8 bits are floats too, but need scales that are not read here."""


def read_eagle3_head(
    directory: Path,
    target_embedding_VC: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num_target_layers: int | None = None,
    target_lm_head_VC: Tensor | None = None,
) -> Eagle3Head:
    """The head in `dtype`, in eval mode, without gradients, in its default variant.

    See `head_of`. Raises CheckpointError.
    """
    shared = SharedWeights(target_embedding_VC, target_lm_head_VC)
    return head_of(describe(directory, num_target_layers).choose(""), directory, shared, dtype)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What a head may take from its target; None: not at hand."""

    embed_tokens: Tensor | None = None  # [V, H]
    lm_head: Tensor | None = None  # [V, H]


def head_of(
    described: CheckpointDescription[Eagle3Config],
    directory: Path,
    shared: SharedWeights,
    dtype: torch.dtype,
) -> Eagle3Head:
    """The head that a description describes.

    `shared` is used where the checkpoint has no embedding or, for a full vocabulary, no lm_head.
    Raises CheckpointError when neither has, when the vocabulary maps contradict each other, or a
    weight is not a float.
    """
    config = described.config
    # On the meta device first: the parameters are replaced, never initialised.
    with torch.device("meta"):
        head = Eagle3Head(config)
    weights = read_weights(directory, described)
    if config.mask_token_id is not None:
        weights["mask_hidden"] = weights["mask_hidden"].flatten()
    lend(weights, described, directory, config.hidden_size, shared)
    head.load_state_dict({n: w.to(dtype) for n, w in weights.items()}, strict=True, assign=True)
    head.target_ids = read_target_ids(directory, described)
    head.reset_frequencies()
    return head.eval().requires_grad_(False)


def read_weights(directory: Path, described: CheckpointDescription[Any]) -> dict[str, Tensor]:
    """{parameter: tensor} of everything described. Raises CheckpointError for what is no float."""
    weights = {
        ours: read_tensor(directory, described, name) for ours, name in described.names.items()
    }
    for name, weight in weights.items():
        if weight.dtype not in _FLOATS:
            raise CheckpointError(f"{name}: expected floating point, got {weight.dtype}")
    return weights


def lend(
    weights: dict[str, Tensor],
    described: CheckpointDescription[Any],
    directory: Path,
    hidden_size: int,
    shared: SharedWeights,
) -> None:
    """Fill in what the checkpoint leaves to its target. An own embedding serves as lm_head too
    where the file ties them."""
    shape = (described.vocab_size, hidden_size)
    own = weights.get("embed_tokens.weight")
    if own is None:
        weights["embed_tokens.weight"] = _borrowed("embed_tokens", shared.embed_tokens, shape)
    if "lm_head.weight" not in weights:
        tied = read_json(directory / "config.json").get("tie_word_embeddings")
        taken = own if tied and own is not None else shared.lm_head
        weights["lm_head.weight"] = _borrowed("lm_head", taken, shape)


def _borrowed(name: str, weight: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if weight is None:
        raise CheckpointError(f"the head has no {name}.weight and no target's was given")
    if tuple(weight.shape) != shape:
        raise CheckpointError(f"target {name} {tuple(weight.shape)}, expected {shape}")
    return weight

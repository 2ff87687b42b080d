"""The target's embedding, final norm and lm_head, read from its safetensors without the model.

A directory in Hugging Face form, single file or sharded. Knows nothing of heads.

Shapes: V target vocabulary, H target hidden size.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from drafter_service.checkpoint.safetensors_header import read_checkpoint_headers
from protos.errors import CheckpointError

EMBED_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
NORM_NAMES = ("model.norm.weight", "norm.weight", "transformer.ln_f.weight")
LM_HEAD_NAMES = ("lm_head.weight",)


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What a draft head shares with its target."""

    embed_tokens: Tensor  # [V, H]
    final_norm: Tensor | None  # [H]
    lm_head: Tensor  # [V, H]


def read_target_weights(directory: Path) -> TargetWeights:
    """Raises CheckpointError when the embedding, or an untied lm_head, is not there."""
    files = {name: info.file for name, info in read_checkpoint_headers(directory).items()}
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    embed = _read(directory, files, EMBED_NAMES)
    if embed is None:
        raise CheckpointError(f"target has no embedding, looked for {', '.join(EMBED_NAMES)}")
    lm_head = _read(directory, files, LM_HEAD_NAMES)
    if lm_head is None:
        if config.get("tie_word_embeddings") is False:
            raise CheckpointError("target has no lm_head.weight although its embeddings are untied")
        lm_head = embed
    return TargetWeights(embed, _read(directory, files, NORM_NAMES), lm_head)


def _read(directory: Path, files: dict[str, str], names: tuple[str, ...]) -> Tensor | None:
    for name in names:
        if name in files:
            with safe_open(directory / files[name], framework="pt") as stream:
                tensor: Tensor = stream.get_tensor(name)
            return tensor
    return None

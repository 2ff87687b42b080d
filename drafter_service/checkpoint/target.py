"""The target's embedding, final norm and lm_head, read from its safetensors without the model.

A directory in Hugging Face form, single file or sharded. Knows nothing of heads.

Shapes: V target vocabulary, H target hidden size.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

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
    files = _files_by_tensor(directory)
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


def _files_by_tensor(directory: Path) -> dict[str, str]:
    index_path = directory / "model.safetensors.index.json"
    if index_path.exists():
        weight_map: dict[str, str] = json.loads(index_path.read_text())["weight_map"]
        return weight_map
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise CheckpointError("target directory holds no safetensors file")
    found: dict[str, str] = {}
    for name in names:
        with safe_open(directory / name, framework="pt") as stream:
            found.update(dict.fromkeys(stream.keys(), name))
    return found


def _read(directory: Path, files: dict[str, str], names: tuple[str, ...]) -> Tensor | None:
    for name in names:
        if name in files:
            with safe_open(directory / files[name], framework="pt") as stream:
                tensor: Tensor = stream.get_tensor(name)
            return tensor
    return None

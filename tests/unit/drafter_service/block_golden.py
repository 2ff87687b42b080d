"""Golden cases of block drafters: loaded through their readers, tensors by name."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from drafter_service.checkpoint.block_reader import read_block_net
from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.target import TargetWeights

ATOL = 1e-4


def load_net(directory: Path, dtype: torch.dtype = torch.float32):
    """(net, description) of a case; what its file lacks comes from its target."""
    described = describe(directory)
    target = target_of(directory)
    embedding, lm_head = (target.embed_tokens, target.lm_head) if target else (None, None)
    return read_block_net(directory, described, embedding, lm_head, dtype), described


def target_of(directory: Path) -> TargetWeights | None:
    path = directory / "target.safetensors"
    if not path.exists():
        path = directory.parent / "target.safetensors"
    if not path.exists():
        return None
    weights = load_file(path)
    return TargetWeights(weights["model.embed_tokens.weight"], None, weights["lm_head.weight"])


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "io.safetensors")


def variant(directory: Path, into: Path, config: dict | None = None, **changes) -> Path:
    """A copy of a case with another config: `config` itself, or the case's with changes."""
    into.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "target.safetensors"):
        if (directory / name).exists():
            shutil.copy(directory / name, into / name)
    if config is None:
        config = json.loads((directory / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (into / "config.json").write_text(json.dumps(config))
    return into


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = ATOL) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-4)

"""Where a drafter computes: the configured name as a torch device. Knows no drafter."""

import torch

from protos.errors import ConfigError


def compute_device(name: str) -> torch.device:
    """`auto` takes a GPU where torch finds one. Raises ConfigError for `cuda` without one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here")
    return torch.device(name)

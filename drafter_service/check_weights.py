"""Are all weights of a checkpoint numbers? Reads every tensor once; knows no family."""

from pathlib import Path

import torch
from safetensors import safe_open

from drafter_service.checkpoint.safetensors_header import weight_files
from protos.errors import CheckpointError


def check_finite(directory: Path) -> None:
    """Raises CheckpointError, naming the first tensor that holds a NaN or an infinity."""
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118  # no mapping: only keys() exists
                tensor = stream.get_tensor(name)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(f"{name} holds values that are not finite")

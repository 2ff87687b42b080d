"""Pickled weights (`.bin`) as tensors: the one place in the project that reads a pickle.

A pickle is a program. `torch.load` with weights_only=True runs it in an unpickler that knows
tensors, storages and plain containers and refuses every other name, so a file can at worst be
refused or waste memory. It is still not used while serving: only this command, run by hand on a
file that its user chose, reads such files, and what it writes is safetensors.
"""

import pickle  # for its error's name alone
from pathlib import Path

import torch
from torch import Tensor

from drafter_service.checkpoint.safetensors_header import read_json
from protos.errors import CheckpointError

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"


def has_only_pickles(directory: Path) -> bool:
    """Whether the weights here are pickled."""
    return not list(directory.glob("*.safetensors")) and bool(pickled_files(directory))


def pickled_files(directory: Path) -> list[Path]:
    """The `.bin` files the checkpoint consists of. Raises CheckpointError for a missing shard."""
    index = directory / _INDEX
    if not index.is_file():
        single = directory / _SINGLE
        return [single] if single.is_file() else sorted(directory.glob("*.bin"))[:1]
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise CheckpointError(f"{_INDEX} has no weight_map")
    names = sorted({str(name) for name in files.values()})
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointError(f"the index names {name!r}, which is not a file beside it")
    return [directory / name for name in names]


def read_pickled(directory: Path) -> dict[str, Tensor]:
    """Every tensor. Raises CheckpointError for a file that holds anything but named tensors."""
    tensors: dict[str, Tensor] = {}
    for path in pickled_files(directory):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{path.name} holds more than tensors, or is broken: {first}"
            ) from error
        if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
            raise CheckpointError(f"{path.name} holds no mapping of names to tensors")
        twice = sorted(set(tensors) & set(loaded))
        if twice:
            raise CheckpointError(f"{path.name} holds tensors of another file again: {twice}")
        # Pickled tensors may share memory, which safetensors does not.
        tensors |= {str(name): tensor.clone().contiguous() for name, tensor in loaded.items()}
    return tensors

"""The target's last decoder layers, read from its safetensors without the model.

Knows no head. Invariant: whole layers or an error.
"""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from drafter_service.checkpoint.safetensors_header import read_checkpoint_headers
from protos.errors import ConfigError

PREFIXES = ("model.layers.", "layers.")


def read_target_layers(directory: Path, count: int) -> list[dict[str, Tensor]]:
    """The last `count` layers, in order: {name within the layer: tensor}.

    Raises ConfigError when there are not so many under a name that is known.
    """
    headers = read_checkpoint_headers(directory)
    for prefix in PREFIXES:
        numbers = {
            int(name.removeprefix(prefix).partition(".")[0])
            for name in headers
            if name.startswith(prefix)
        }
        if len(numbers) >= count:
            break
    else:
        raise ConfigError(f"expected {count} layers of the target under one of {PREFIXES}")
    layers = []
    for number in sorted(numbers)[-count:]:
        place = f"{prefix}{number}."
        layers.append(
            {
                name.removeprefix(place): _read(directory / info.file, name)
                for name, info in headers.items()
                if name.startswith(place)
            }
        )
    return layers


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as stream:
        tensor: Tensor = stream.get_tensor(name)
    return tensor

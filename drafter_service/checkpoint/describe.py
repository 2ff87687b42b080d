"""What a drafter's checkpoint is, told without torch: for a head node that checks a cluster.

A table of families, each of which recognises its own files and describes them. Knows no tensors'
values. Invariant: `describe` and the readers that load weights use the same functions for config
and names, so they accept the same files.
"""

from pathlib import Path
from typing import Any

from drafter_service.checkpoint.block_family import BLOCK
from drafter_service.checkpoint.description import CheckpointDescription, CheckpointFiles, Family
from drafter_service.checkpoint.eagle3_family import EAGLE3
from drafter_service.checkpoint.eagle_family import EAGLE
from drafter_service.checkpoint.safetensors_header import read_checkpoint_headers, read_json
from protos.errors import CheckpointError

FAMILIES: tuple[Family, ...] = (EAGLE3, EAGLE, BLOCK)
"""In this order; the first that recognises a checkpoint describes it."""


def describe(directory: Path, num_target_layers: int | None = None) -> CheckpointDescription[Any]:
    """Raises CheckpointError when no drafter of ours can use it, saying what was expected.

    `num_target_layers` is needed by formats that do not name their aux layers.
    """
    tensors = read_checkpoint_headers(directory)
    config = read_json(directory / "config.json")
    files = CheckpointFiles(directory, config, tensors, num_target_layers)
    for family in FAMILIES:
        if family.recognise(files):
            return _described(family, files)
    raise CheckpointError(
        f"no drafter's checkpoint: speculators_model_type {config.get('speculators_model_type')!r},"
        f" architectures {config.get('architectures')!r}, looked for "
        f"{', '.join(family.name for family in FAMILIES)}"
    )


def _described(family: Family, files: CheckpointFiles) -> CheckpointDescription[Any]:
    try:
        return family.describe(files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"config.json of a checkpoint of {family.name} cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error


def target_layers(target_dir: Path) -> int | None:
    """Decoder layers of a target in Hugging Face form; None when its config does not say.

    Raises CheckpointError when there is no config.json.
    """
    config = read_json(target_dir / "config.json")
    layers = config.get("num_hidden_layers")
    if layers is None and isinstance(config.get("text_config"), dict):
        layers = config["text_config"].get("num_hidden_layers")
    return None if layers is None else int(layers)

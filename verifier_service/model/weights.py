"""The weight files of a target: which are read, and what is wrong with them, by file name.

One `model.safetensors`, or an index and the shards that it names; nothing else in the directory is
read. Looks at headers only, so that a missing, damaged or ambiguous file is named before anything
is loaded. Knows no model.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from protos.errors import CheckpointError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_NAMES_SHOWN: Final = 3


def check_weight_files(directory: Path) -> tuple[Path, ...]:
    """The files that hold the weights of the target in `directory`, in order of names.

    Raises CheckpointError, naming the file.
    """
    single, index = directory / SINGLE, directory / INDEX
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(_nothing_to_read(directory))
        _names_in(single)
        return (single,)
    placed = _read_index(index)
    shards = {name: directory / name for name in sorted(set(placed.values()))}
    if single.is_file() and SINGLE not in shards:
        raise CheckpointError(
            f"{directory.name} holds {SINGLE} beside {INDEX}, which does not name it: remove one"
        )
    for name, shard in shards.items():
        if not shard.is_file():
            raise CheckpointError(f"{directory.name}: {INDEX} names {name}, which is missing")
        _check_shard(shard, placed)
    return tuple(shards.values())


def check_all_used(
    name: str, missing: Collection[str], unused: Collection[str], misshapen: Collection[str]
) -> None:
    """Raise CheckpointError unless a loaded model's tensors and its files' are the same."""
    faults = {
        "lack": missing,
        "hold what the config does not describe:": unused,
        "give another shape to": misshapen,
    }
    for fault, names in faults.items():
        if names:
            raise CheckpointError(f"{name}: the weights {fault} {_listed(names)}")


def _nothing_to_read(directory: Path) -> str:
    found = sorted(file.name for file in directory.glob("*.safetensors"))
    if found:
        return (
            f"{directory.name} holds neither {SINGLE} nor {INDEX}, only {_listed(found)}; "
            f"shards need their index"
        )
    pickled = sorted(file.name for file in directory.glob("*.bin"))
    if pickled:
        return f"{directory.name}: {_listed(pickled)} is pickled; only safetensors are read"
    return f"{directory.name} holds no safetensors weights"


def _read_index(index: Path) -> dict[str, str]:
    """File name by tensor name."""
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index.name} cannot be read: {error!r}") from error
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index.name} names no tensors")
    for name in placed.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith("safetensors"):
            raise CheckpointError(f"{index.name} names {name!r}, which is no safetensors file")
    return placed


def _check_shard(shard: Path, placed: Mapping[str, str]) -> None:
    own = {tensor for tensor, name in placed.items() if name == shard.name}
    names = _names_in(shard)
    if own - names:
        raise CheckpointError(f"{shard.name} lacks {_listed(own - names)}, which {INDEX} names")
    if names - own:
        raise CheckpointError(f"{shard.name} holds {_listed(names - own)}, against {INDEX}")


def _names_in(file: Path) -> set[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return set(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from error


def _listed(names: Collection[str]) -> str:
    first = sorted(names)[:_NAMES_SHOWN]
    rest = len(names) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")

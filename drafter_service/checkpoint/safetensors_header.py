"""Names, dtypes and shapes of the tensors of a checkpoint directory, read without torch.

A safetensors file begins with an 8-byte little-endian length and that many bytes of JSON. Sharded
checkpoints have `model.safetensors.index.json`. Knows nothing of what tensors mean. Invariant:
no weight is loaded, and a header is bounded before it is read.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.errors import CheckpointError

MAX_HEADER_BYTES = 100 * 1024 * 1024
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DIGEST_HEX = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it looks like; `dtype` in safetensors' spelling (BF16, I64)."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one file. Raises CheckpointError when it is no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        header_len = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_len <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path.name}: header of {header_len} bytes in a file of {size}")
        try:
            header = json.loads(stream.read(header_len))
            return {
                name: TensorInfo(path.name, str(entry["dtype"]), tuple(map(int, entry["shape"])))
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name}: not a safetensors header: {error}") from error


def read_checkpoint_headers(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint, single file or sharded.

    Raises CheckpointError when there is none, or only pickled weights (.bin, .pt), which this
    project never opens.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(directory):
        for name, info in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} is in both {tensors[name].file}, {info.file}")
            tensors[name] = info
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files a checkpoint consists of, sorted by name."""
    index_path = directory / INDEX_NAME
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map", {})
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = [SINGLE_NAME] if (directory / SINGLE_NAME).exists() else []
    if not names:
        pickled = sorted(path.name for path in directory.glob("*") if path.suffix in _PICKLED)
        found = f"only pickled weights ({', '.join(pickled)}): {_SAFE}" if pickled else "no weights"
        raise CheckpointError(f"expected {SINGLE_NAME} or {INDEX_NAME}, found {found}")
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointError(f"the index names {name!r}, which is not a file beside it")
    return [directory / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError when it is missing or something else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: expected a JSON object, got {type(value).__name__}")
    return value


def checkpoint_digest(directory: Path) -> str:
    """First 32 hex digits of sha256 over config.json and the weight files, in order of name."""
    sha = hashlib.sha256()
    for path in [directory / "config.json", *weight_files(directory)]:
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                sha.update(chunk)
    return sha.hexdigest()[:DIGEST_HEX]


_SAFE = "`outrider convert DIR NEW --to safetensors` makes them safe"
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt"})

"""A GGUF file as a Hugging Face directory: dequantised by transformers once, then cached.

Knows no family: whatever transformers reads from GGUF becomes bf16 safetensors, and is served or
refused like any other directory. Reaches no hub. Invariant: a directory that is returned is
complete, however many processes asked for it at once (file lock, atomic rename).
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from protos.errors import CheckpointError, ConfigError

SUFFIX: Final = ".gguf"
_HINT: Final = "install the `gguf` extra: pip install 'outrider[gguf]'"
_READERS: Final = ("gguf", "accelerate")

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "outrider"


def is_gguf(target: str) -> bool:
    """True for a target that names a GGUF file."""
    return target.lower().endswith(SUFFIX)


def ensure_gguf_target(file: Path, cache_dir: Path | None = None, name: str = "") -> Path:
    """The directory of the model in `file`, written on the first call (seconds and memory).

    Called `name` (else as the file is) and its digest, so that another file makes a new one.
    Raises ConfigError when there is no such file or what reads it is not installed,
    CheckpointError when transformers cannot read it.
    """
    if not file.is_file():
        raise ConfigError(f"target: there is no file {file.name!r}")
    root = cache_dir if cache_dir is not None else default_cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    name = name or file.name[: -len(SUFFIX)]
    with _locked(root / "gguf.lock"):
        target = root / f"{name}-{_digest(file)[:12]}"
        if not target.is_dir():
            logger.info("converting %s to bf16 safetensors, once", file.name)
            _convert(file, target)
    return target


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` against other converters, in any process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _convert(source: Path, target: Path) -> None:
    missing = [name for name in _READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"reading {source.name} needs {', '.join(missing)}; {_HINT}")
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(source, scratch)
        scratch.rename(target)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        # What transformers and the GGUF reader raise for files that they do not understand.
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{source.name} cannot be read: {reason}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(source: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from verifier_service.model.quiet import no_progress_bars

    where = {"gguf_file": source.name, "local_files_only": True}
    with no_progress_bars():
        AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            **where,
        )
        model.save_pretrained(directory)

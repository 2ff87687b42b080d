"""How synthesised user turns begin: a list of words and openings, one drawn for each candidate.

One opening a line; empty lines and lines that begin with `#` say nothing. Invariant: the draw
follows from the run's seed and the candidate's number alone.
"""

import hashlib
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Openings:
    """texts: may be empty, then every turn begins freely. seed: of the whole run."""

    texts: tuple[str, ...]
    seed: int

    def of(self, index: int) -> str:
        """The opening of candidate `index`; "" without a list."""
        if not self.texts:
            return ""
        digest = hashlib.sha256(f"opening:{self.seed}:{index}".encode()).digest()
        return self.texts[int.from_bytes(digest[:7], "little") % len(self.texts)]


def default_openings() -> Path:
    """configs/train/seed_words.txt, as installed."""
    return Path(str(importlib.resources.files("configs").joinpath("train", "seed_words.txt")))


def load_openings(path: Path) -> tuple[str, ...]:
    """The file's openings in order, repeated ones once. Raises ConfigError when there is none."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"seed words: {path.name} cannot be read as UTF-8 text") from error
    found = [line.strip() for line in lines]
    openings = tuple(dict.fromkeys(line for line in found if line and not line.startswith("#")))
    if not openings:
        raise ConfigError(f"seed words: {path.name} holds none")
    return openings


def digest_of(texts: Sequence[str]) -> str:
    """Identifies a list, for the settings of a run."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

"""The digest of a checkpoint directory: how verifier and drafter know that they mean one target.

sha256 over the names and contents of config.json and the safetensors files. Knows no format.
"""

import hashlib
from pathlib import Path
from typing import Final

DIGEST_HEX: Final = 32
"""Hex digits kept."""


def directory_digest(directory: Path) -> str:
    """Digest of the checkpoint in `directory`; raises OSError when it cannot be read."""
    digest = hashlib.sha256()
    for file in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        digest.update(file.name.encode())
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()[:DIGEST_HEX]

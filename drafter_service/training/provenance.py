"""Where a shipped head comes from: enough to make it again, and what it measured.

Knows no tensors. Invariant: only facts of this run; nothing about the machine's paths or users.
"""

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafter_service.training.recipe import HeldOut
from drafter_service.training.settings import TrainSettings
from drafter_service.training.telling import told_command, told_settings
from drafter_service.training.trainer import Position

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "msgpack")


def provenance(
    command: Sequence[str],
    settings: TrainSettings,
    position: Position,
    facts: Mapping[str, object],
    held_out: HeldOut,
    started_from: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """What goes into provenance.json."""
    return {
        "command": told_command(command),
        "commit": commit_of(Path(__file__).parent),
        "versions": {"python": platform.python_version(), **_versions()},
        "settings": told_settings(settings),
        "data": {
            "answers_sha256": {path.name: sha256_of(path) for path in settings.answers},
            "target_weights_sha256": {
                path.name: sha256_of(path) for path in sorted(settings.target.glob("*.safetensors"))
            },
        },
        "trained": asdict(position),
        **facts,
        "held_out": {"tau": held_out.score, **held_out.figures},
        **({} if started_from is None else {"started_from": dict(started_from)}),
        "embedding": "left out; it is the target's, frozen in training, and readers share it",
        "weights": "running average of the float32 master weights, rounded to bfloat16",
    }


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def commit_of(directory: Path) -> str:
    """The commit the code was run from, or `unknown` outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=directory, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}

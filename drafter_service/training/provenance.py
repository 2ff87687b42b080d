"""Where weights come from: enough to make them again, and what they measured.

    <run>/provenance.json           the run: settings, data, warm start, one entry per start
    <head>/provenance.json          the same facts of an exported head, with its figures
    started_from                    a warm start's own facts, its own warm start within them

Knows no tensors. Invariant: only facts of this run; nothing about the machine's paths or users.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from drafter_service.training.facts_file import NAME, read_facts
from drafter_service.training.settings import TrainSettings
from drafter_service.training.telling import told_command, told_settings

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "msgpack")
INHERITED = (
    *("kind", "command", "commit", "commit_has_changes", "starts", "seeds", "settings", "data"),
    *("trained", "started_from"),
)
"""What is kept of the provenance of the weights that a run started from."""

Origin = dict[str, object]
"""Facts of a warm start's first weights, as JSON has them."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run: the command, the code, the machine. position: where it went on."""

    command: Sequence[str]
    num_workers: int
    position: Mapping[str, int]

    def facts(self) -> dict[str, object]:
        """As JSON has them."""
        return {
            "command": told_command(self.command),
            "from": dict(self.position),
            **code_facts(),
            "hardware": {**hardware_facts(), "workers": self.num_workers},
        }


def run_facts(
    kind: str,
    settings: TrainSettings,
    sizes: Mapping[str, int],
    facts: Mapping[str, object],
    starts: Sequence[Mapping[str, object]],
    origin: Origin | None,
) -> dict[str, object]:
    """What a run is, whatever came of it. sizes: of its data; facts: of the recipe."""
    seeds = {name: value for name, value in settings.model_dump().items() if name.endswith("seed")}
    return {
        "kind": kind,
        "starts": list(starts),
        "seeds": seeds,
        "settings": told_settings(settings),
        "data": {**sizes, **data_facts(settings)},
        **facts,
        **({} if origin is None else {"started_from": origin}),
    }


def add_start(run: Path, facts: Mapping[str, object]) -> None:
    """Write `run_facts` beside a run's state, the starts of earlier facts before its own."""
    earlier = read_facts(run).get("starts", [])
    starts = facts["starts"]
    assert isinstance(starts, list)  # as run_facts makes them
    text = json.dumps({**facts, "starts": [*_listed(earlier), *starts]}, indent=1)
    temporary = run / f"{NAME}.tmp"
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, run / NAME)


def origin_of(weights: Path) -> Origin:
    """Facts of the weights that a run starts from: an exported checkpoint or a run's state file.

    Those of its own provenance are taken over, so that a chain of warm starts is told whole.
    """
    directory = weights if weights.is_dir() else weights.parent
    file = weights / "model.safetensors" if weights.is_dir() else weights
    origin: Origin = {"name": weights.resolve().name, "weights_sha256": sha256_of(file)}
    if not weights.is_dir():
        with safe_open(file, framework="pt") as stream:
            origin["trained"] = json.loads((stream.metadata() or {}).get("position", "null"))
    told = read_facts(directory)
    if not weights.is_dir() and not told.get("starts"):
        return origin  # the directory's file tells of something else
    return {**{name: told[name] for name in INHERITED if name in told}, **origin}


def data_facts(settings: TrainSettings) -> dict[str, object]:
    """Digests of what a run reads."""
    weights = sorted(settings.target.glob("*.safetensors"))
    return {
        "answers_sha256": {path.name: sha256_of(path) for path in settings.answers},
        "target_weights_sha256": {path.name: sha256_of(path) for path in weights},
    }


def code_facts(source: Path = Path(__file__)) -> dict[str, object]:
    """The commit that holds `source`, whether tracked files differ from it, and versions."""
    directory = source.parent
    commit, changes = "unknown", None
    # A checkout may lie around an installed package without holding it.
    if _git(directory, "ls-files", "--error-unmatch", source.name) is not None:
        commit = _git(directory, "rev-parse", "HEAD") or "unknown"
        changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "commit_has_changes": None if changes is None else bool(changes),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }


def hardware_facts() -> dict[str, object]:
    """What arithmetic depends on: architecture, vector instructions, threads."""
    able = torch.cpu.get_capabilities()
    facts: dict[str, object] = {
        "architecture": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(able.get("amx_tile", False)),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def _git(directory: Path, *words: str) -> str | None:
    """What git says, None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=directory, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

"""provenance.json, as it is read: a JSON object of facts beside weights. Knows no torch."""

import json
from pathlib import Path

from protos.errors import ConfigError

NAME = "provenance.json"


def read_facts(directory: Path) -> dict[str, object]:
    """What a directory's provenance.json says, nothing where there is none.

    Raises ConfigError when it holds no JSON object.
    """
    path = directory / NAME
    if not path.exists():
        return {}
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{NAME} in {directory.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{NAME} in {directory.name} holds no JSON object")
    return {str(name): value for name, value in found.items()}

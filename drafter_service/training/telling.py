"""Settings and commands as they may be told to others: values whole, paths by their last name.

Knows no run. Invariant: no directory of this machine gets through.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from drafter_service.training.settings import TrainSettings

_DIRECTORIES = re.compile(r"[^=,:\[\]{}'\"]*/")


def told_settings(settings: TrainSettings) -> dict[str, object]:
    """Every setting, as JSON has it."""
    return {name: _told(value) for name, value in settings.model_dump().items()}


def told_command(words: Sequence[str]) -> str:
    """A command line for a shell, every path in it cut to its last name."""
    return shlex.join(_DIRECTORIES.sub("", word.rstrip("/")) for word in words)


def _told(value: object) -> object:
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, Mapping):
        return {str(name): _told(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_told(inner) for inner in value]
    return value

"""Settings changed on the command line: `--set FIELD=VALUE`, over what the file says.

    --set num_steps=5 --set head.aux_layers=[14] --set minutes=null

VALUE is YAML, FIELD a path of names joined by dots. Knows no settings: names and bounds are the
settings' own, checked after the change, so an override is refused exactly as the file would be.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import yaml

from protos.errors import ConfigError

Override = tuple[tuple[str, ...], object]
"""A path of names and the value to put there."""


def parse_override(text: str) -> Override:
    """Raises ConfigError unless it is FIELD=VALUE with VALUE in YAML."""
    field, equals, value = text.partition("=")
    names = tuple(name.strip() for name in field.split("."))
    if not equals or not all(names):
        raise ConfigError(f"--set takes FIELD=VALUE, such as num_steps=5, not {text!r}")
    if not value.strip():
        raise ConfigError(f"--set {text}: no value; write {field}=null for none")
    try:
        return names, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: the value is not YAML") from error


def overridden(document: object, overrides: Sequence[Override]) -> dict[str, object]:
    """A copy of `document`, a file's mapping, with every override in it; later ones win.

    Raises ConfigError where a name leads into something that is no section.
    """
    if not isinstance(document, Mapping):
        raise ConfigError("must hold a mapping of settings")
    changed: dict[str, object] = dict(document)
    for names, value in overrides:
        section = changed
        for depth, name in enumerate(names[:-1]):
            inner = section.get(name, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{'.'.join(names)}: {'.'.join(names[: depth + 1])} has no parts")
            section[name] = dict(cast("Mapping[str, object]", inner))
            section = cast("dict[str, object]", section[name])
        section[names[-1]] = value
    return changed

"""The one door to a drafter: settings in, a drafter out. `kinds` says where each kind's code is."""

import secrets
from pathlib import Path

from drafter_service.config import DrafterSettings
from drafter_service.drafter import Drafter
from drafter_service.kinds import find_kind, import_place
from protos.errors import ConfigError
from protos.exchange import Capabilities


def build_drafter(settings: DrafterSettings, target_dir: Path | None = None) -> Drafter:
    """Load the drafter that `settings` describe, with a fresh incarnation.

    target_dir: the target's directory; `settings.target` when None. `settings.num_threads` is left
    to whoever owns the process. Raises ConfigError or CheckpointError.
    """
    if target_dir is None and settings.target:
        target_dir = Path(settings.target)
    place = find_kind(settings.kind).load
    incarnation = fresh_incarnation()
    drafter: Drafter = import_place(place)(settings, target_dir, incarnation)
    described = getattr(drafter, "capabilities", None)
    if not isinstance(described, Capabilities) or described.incarnation != incarnation:
        raise ConfigError(f"{place} made no drafter: its capabilities must carry the incarnation")
    return drafter


def fresh_incarnation() -> int:
    """A number that no earlier process of this drafter had."""
    return secrets.randbits(63) | 1

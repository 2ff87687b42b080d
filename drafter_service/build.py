"""The one door to a drafter: settings in, a drafter out. Kinds are named here and nowhere else."""

import secrets
from pathlib import Path

from drafter_service.config import DrafterSettings
from drafter_service.drafter import Drafter
from drafter_service.eagle3.load import load_eagle3
from drafter_service.ngram import Ngram
from drafter_service.service import SessionDrafter
from protos.errors import ConfigError
from protos.exchange import Capabilities, PlanKind


def build_drafter(settings: DrafterSettings, target_dir: Path | None = None) -> Drafter:
    """Load the drafter that `settings` describe, with a fresh incarnation.

    target_dir: the target's directory; `settings.target` when None. `settings.num_threads` is left
    to whoever owns the process. Raises ConfigError or CheckpointError.
    """
    if settings.kind == "ngram":
        return _build_ngram(settings)
    if settings.kind == "eagle3":
        if target_dir is None and settings.target:
            target_dir = Path(settings.target)
        return load_eagle3(settings, target_dir, fresh_incarnation())
    raise ConfigError(f"kind must be ngram or eagle3, not {settings.kind!r}")


def fresh_incarnation() -> int:
    """A number that no earlier process of this drafter had."""
    return secrets.randbits(63) | 1


def _build_ngram(settings: DrafterSettings) -> Drafter:
    limits = settings.limits
    capabilities = Capabilities(
        kind=settings.kind,
        name=settings.label,
        incarnation=fresh_incarnation(),
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE),
        max_context=limits.max_context,
        max_sessions=limits.max_sessions,
        max_depth=limits.max_depth,
        max_width=limits.max_width,
        max_nodes=limits.max_nodes,
    )
    return SessionDrafter(capabilities, Ngram(), settings.idle_session_s)

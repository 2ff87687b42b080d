"""An `ngram` drafter: it needs no checkpoint and no target."""

from pathlib import Path

from drafter_service.config import DrafterSettings
from drafter_service.ngram.drafter import Ngram, NgramSession
from drafter_service.service import SessionDrafter
from protos.exchange import Capabilities, PlanKind


def load_ngram(
    settings: DrafterSettings, target_dir: Path | None, incarnation: int
) -> SessionDrafter[NgramSession]:
    """The drafter; any target will do."""
    limits = settings.limits
    capabilities = Capabilities(
        kind=settings.kind,
        name=settings.label,
        incarnation=incarnation,
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE),
        max_context=limits.max_context,
        max_sessions=limits.max_sessions,
        max_depth=limits.max_depth,
        max_width=limits.max_width,
        max_nodes=limits.max_nodes,
    )
    return SessionDrafter(capabilities, Ngram(), settings.idle_session_s)

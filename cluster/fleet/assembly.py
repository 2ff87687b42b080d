"""Puts one verifier replica together: target, draft exchange, planner, engine.

Runs inside a replica, on a thread: it imports torch through the services' own modules and blocks
for seconds. Knows no Ray. Invariant: every drafter with a checkpoint has its feature rows kept
beside the KV, under its digest, wherever it runs.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import NGRAM, ClusterConfig, DrafterEntry, SecuritySection
from cluster.fleet.pairs import (
    Reading,
    best_reading,
    log_choice,
    readings_of,
    taps_of,
    try_readings,
)
from drafter_service.config import DrafterSettings
from protos.errors import ConfigError

if TYPE_CHECKING:
    from drafter_service.drafter import Drafter
    from drafter_service.kinds import Description
    from drafter_service.server import DrafterServer
    from protos.channel import Security
    from verifier_service.engine.draft_form import TargetEnd
    from verifier_service.engine.drafting import DraftExchange
    from verifier_service.engine.service import EngineService
    from verifier_service.planning.planner import AdaptivePlanner
    from verifier_service.step import TapSpec, Target


@dataclass(frozen=True, slots=True)
class VerifierParts:
    """What a verifier replica is made of."""

    service: "EngineService"
    exchange: "DraftExchange"
    planner: "AdaptivePlanner"


def describe_entry(
    entry: DrafterEntry, num_target_layers: int | None = None
) -> "Description | None":
    """What this drafter's checkpoint says of itself; None when it eats tokens only.

    Torch-free. num_target_layers is needed by checkpoints that do not name their aux layers.
    Raises: CheckpointError, ConfigError.
    """
    if not entry.checkpoint:
        return None
    from drafter_service.kinds import describe_checkpoint

    return describe_checkpoint(entry.kind, checkpoint_dir(entry.checkpoint), num_target_layers)


def checkpoint_dir(name: str) -> Path:
    """A checkpoint's directory: a path, or the name of a head that ships with drafter_service.

    Raises: ConfigError.
    """
    import drafter_service

    shipped = Path(drafter_service.__file__).parent / "heads" / name
    for candidate in (Path(name), shipped):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"checkpoint {name!r} is neither a directory nor a shipped head")


def build_verifier(config: ClusterConfig, token: str) -> VerifierParts:
    """Load the target and everything around it. Blocks.

    Raises: CheckpointError, ConfigError, IncompatiblePair.
    """
    from verifier_service.build import engine_settings, grammars_of, pair_book, tracer_of
    from verifier_service.device import resolve_device
    from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
    from verifier_service.engine.loop import Engine
    from verifier_service.engine.rows import PagedRows
    from verifier_service.engine.service import EngineService
    from verifier_service.model.embedded import default_cache_dir
    from verifier_service.model.load import load_target
    from verifier_service.model.target import ROW_DTYPES
    from verifier_service.planning.costs import VerifyCosts
    from verifier_service.planning.measure import load_or_measure
    from verifier_service.planning.planner import AdaptivePlanner

    section = config.verifier
    target_dir = resolve_target(section.target)
    by_name = {row_dtype.value: dtype for dtype, row_dtype in ROW_DTYPES.items()}

    def load(taps: "Sequence[TapSpec]") -> "Target":
        return load_target(
            target_dir,
            by_name[section.dtype],
            taps,
            num_threads=section.num_threads,
            max_context=section.engine.max_context,
            device=resolve_device(section.device),
        )

    config, taps = settle_variants(config, target_dir, load)
    target = load(taps)
    rows = PagedRows(target)
    end = _target_end(target, taps)
    exam = pair_book(target, end, target_dir, section.engine.min_agreement)
    security = security_of(config.security, token)
    exchange = DraftExchange(end, rows, ExchangeSettings(security=security), exam)
    _add_local(exchange, config, target_dir)
    planner = AdaptivePlanner(
        VerifyCosts(load_or_measure(target, default_cache_dir()), target.tree_parts)
    )
    sizes = engine_settings(section.engine, target.facts.bytes_per_slot)
    tracer = tracer_of(section.traces, target.facts)
    grammars = grammars_of(target_dir, target.facts)
    engine = Engine(target, exchange, planner, sizes, rows, tracer, grammars=grammars)
    service = EngineService(engine)
    return VerifierParts(service, exchange, planner)


def settle_variants(
    config: ClusterConfig, target_dir: Path, load: "Callable[[Sequence[TapSpec]], Target]"
) -> "tuple[ClusterConfig, list[TapSpec]]":
    """The config with every checkpoint read in one way, and the rows to keep: a tap per digest.

    `load` reads the target for the test of checkpoints whose files leave open how they are meant.
    """
    from drafter_service.checkpoint.describe import target_layers

    num_layers = target_layers(target_dir)
    taps: dict[str, TapSpec] = {}
    entries = []
    for entry in config.drafters:
        description = describe_entry(entry, num_layers)
        readings = readings_of(description, entry.variant)
        kept = readings[0]
        if len(readings) > 1:
            kept = _best_reading(entry, readings, target_dir, load(taps_of(readings)))
        entries.append(entry.model_copy(update={"variant": kept.label}))
        if description is not None and kept.tap is not None:
            taps.setdefault(description.digest, replace(kept.tap, key=description.digest))
    return config.model_copy(update={"drafters": entries}), list(taps.values())


def _best_reading(
    entry: DrafterEntry, readings: Sequence[Reading], target_dir: Path, target: "Target"
) -> Reading:
    """The reading of a checkpoint with which its first guesses are right most often."""
    from drafter_service.build import build_drafter

    def build(variant: str) -> "Drafter":
        asked = entry.model_copy(update={"variant": variant})
        return build_drafter(drafter_settings(asked, target_dir), target_dir)

    tried = try_readings(target, target_dir, readings, build)
    kept = best_reading(tried)
    log_choice(entry.name, tried, kept)
    return kept.reading


def _target_end(target: "Target", taps: "Sequence[TapSpec]") -> "TargetEnd":
    from verifier_service.engine.draft_form import TargetEnd
    from verifier_service.pairing import row_form

    facts = target.facts
    forms = {tap.key: row_form(tap, target.row_width(tap.key), facts.dtype) for tap in taps}
    return TargetEnd(facts.vocab_size, facts.max_context, facts.digest, forms)


def _add_local(exchange: "DraftExchange", config: ClusterConfig, target_dir: Path) -> None:
    """`ngram`, and the drafters that are to run in this process."""
    from drafter_service.build import build_drafter

    exchange.add_local(build_drafter(DrafterSettings(kind="ngram", name=NGRAM)), NGRAM)
    for entry in config.drafters:
        if entry.colocated:
            drafter = build_drafter(drafter_settings(entry, target_dir), target_dir)
            exchange.add_local(drafter, entry.name)


def build_drafter_server(
    config: ClusterConfig, entry: DrafterEntry, token: str, host: str
) -> "DrafterServer":
    """Load a drafter and put a server before it, not yet listening. Blocks.

    Raises: CheckpointError, ConfigError, IncompatiblePair.
    """
    from drafter_service.build import build_drafter
    from drafter_service.process import prepare_process
    from drafter_service.server import DrafterServer

    target_dir = resolve_target(config.verifier.target)
    settings = drafter_settings(entry, target_dir)
    prepare_process(settings)
    drafter = build_drafter(settings, target_dir)
    security = security_of(config.security, token)
    return DrafterServer(drafter, security, host, 0, settings.limits.max_works)


def security_of(section: SecuritySection, token: str) -> "Security":
    """Between verifiers and drafters, both sides of it; where Ray has certificates, its own."""
    from protos.channel import TlsFiles, trust

    tls, own = section.tls, None
    if tls is not None:
        own = TlsFiles(tls.authority, tls.certificate, tls.key, tls.server_name)
    return trust(token, own, os.environ, insecure=section.insecure)


def drafter_settings(entry: DrafterEntry, target_dir: Path) -> DrafterSettings:
    """A config entry as drafter_service wants it, with directories resolved."""
    checkpoint = str(checkpoint_dir(entry.checkpoint)) if entry.checkpoint else ""
    return entry.settings(str(target_dir), checkpoint)


def resolve_target(target: str) -> Path:
    """The directory of a configured target; one that comes as GGUF is written when missing.

    Raises: CheckpointError, ConfigError.
    """
    from verifier_service.model.embedded import ensure_target

    return ensure_target(target)

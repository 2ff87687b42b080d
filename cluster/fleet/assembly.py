"""Puts one verifier replica together: target, draft exchange, planner, engine.

Runs inside a replica, on a thread: it imports torch through the services' own modules and blocks
for seconds. Knows no Ray. Invariant: every drafter with a checkpoint has its feature rows kept
beside the KV, under its digest, wherever it runs.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import NGRAM, ClusterConfig, DrafterEntry
from drafter_service.config import DrafterSettings
from protos.errors import ConfigError
from protos.features import ProjectionSpec
from verifier_service.config import EMBEDDED

if TYPE_CHECKING:
    from drafter_service.server import DrafterServer
    from verifier_service.engine.drafting import DraftExchange
    from verifier_service.engine.ports import RowReader
    from verifier_service.engine.service import EngineService
    from verifier_service.step import TapSpec, Target


@dataclass(frozen=True, slots=True)
class VerifierParts:
    """What a verifier replica is made of."""

    service: "EngineService"
    exchange: "DraftExchange"


def projection_of(
    entry: DrafterEntry, num_target_layers: int | None = None
) -> ProjectionSpec | None:
    """The input projection that verifiers run for this drafter; None when it eats tokens only.

    Torch-free. num_target_layers is needed by checkpoints that do not name their aux layers.
    Raises: CheckpointError, ConfigError.
    """
    if not entry.checkpoint:
        return None
    from drafter_service.kinds import describe_checkpoint

    directory = checkpoint_dir(entry.checkpoint)
    description = describe_checkpoint(entry.kind, directory, num_target_layers)
    return None if description is None else description.projection


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
    from verifier_service.build import engine_settings
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
    taps = _taps(config, num_layers_of(target_dir))
    by_name = {row_dtype.value: dtype for dtype, row_dtype in ROW_DTYPES.items()}
    target = load_target(
        target_dir,
        by_name[section.dtype],
        taps,
        num_threads=section.num_threads,
        max_context=section.engine.max_context,
    )
    rows = PagedRows(target)
    exchange = _exchange(target, taps, rows, token)
    _add_local(exchange, config, target_dir)
    planner = AdaptivePlanner(VerifyCosts(load_or_measure(target, default_cache_dir())))
    sizes = engine_settings(section.engine, target.facts.bytes_per_slot)
    return VerifierParts(EngineService(Engine(target, exchange, planner, sizes, rows)), exchange)


def num_layers_of(target_dir: Path) -> int | None:
    """Decoder layers of the target, as its config says."""
    config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers")
    return None if layers is None else int(layers)


def _taps(config: ClusterConfig, num_layers: int | None) -> "list[TapSpec]":
    """Rows to keep, one tap per checkpoint, whoever runs it."""
    from verifier_service.step import TapSpec

    found = (projection_of(entry, num_layers) for entry in config.drafters)
    specs = {spec.digest: spec for spec in found if spec is not None}
    return [TapSpec(digest, spec.aux_layers, spec) for digest, spec in specs.items()]


def _exchange(
    target: "Target", taps: "list[TapSpec]", rows: "RowReader", token: str
) -> "DraftExchange":
    from protos.channel import Security
    from verifier_service.engine.draft_form import TargetEnd
    from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
    from verifier_service.pairing import row_form

    facts = target.facts
    forms = {tap.key: row_form(tap, target.row_width(tap.key), facts.dtype) for tap in taps}
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, forms)
    return DraftExchange(end, rows, ExchangeSettings(security=Security(token=token)))


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
    from protos.channel import Security

    target_dir = resolve_target(config.verifier.target)
    settings = drafter_settings(entry, target_dir)
    prepare_process(settings)
    drafter = build_drafter(settings, target_dir)
    security = Security(token=token, insecure=config.security.insecure)
    return DrafterServer(drafter, security, host, 0, settings.limits.max_works)


def drafter_settings(entry: DrafterEntry, target_dir: Path) -> DrafterSettings:
    """A config entry as drafter_service wants it, with directories resolved."""
    checkpoint = str(checkpoint_dir(entry.checkpoint)) if entry.checkpoint else ""
    return entry.settings(str(target_dir), checkpoint)


def resolve_target(target: str) -> Path:
    """The directory of a configured target; the embedded one is written when it is missing.

    Raises: ConfigError.
    """
    if target == EMBEDDED:
        from verifier_service.model.embedded import ensure_embedded_target

        return ensure_embedded_target()
    directory = Path(os.path.expanduser(target))
    if not (directory / "config.json").is_file():
        raise ConfigError(f"verifier.target: {directory.name!r} holds no config.json")
    return directory

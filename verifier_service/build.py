"""Puts a verifier on its own together: target, draft exchange, planner, engine.

Blocks for seconds (weights, measurements). Knows no wire but addresses. A drafter that cannot be
reached while starting costs speed only: the verifier serves without it.
"""

import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from protos.channel import Security, TlsFiles, trust
from protos.errors import ConfigError, OutriderError, PeerUnavailable
from protos.exchange import DrafterReplica
from verifier_service.config import (
    EngineSection,
    RemoteDrafter,
    TraceSection,
    VerifierSettings,
)
from verifier_service.device import resolve_device
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange, ExchangeSettings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner
from verifier_service.engine.remote_describe import describe_drafter
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.service import EngineService
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.vocabulary import read_vocabulary
from verifier_service.model.embedded import default_cache_dir, ensure_target
from verifier_service.model.load import load_target
from verifier_service.model.target import ROW_DTYPES
from verifier_service.pairing import row_form, tap_for
from verifier_service.pairs.book import PairBook
from verifier_service.pairs.text import read_text, text_ids
from verifier_service.planning.costs import VerifyCosts
from verifier_service.planning.measure import load_or_measure
from verifier_service.planning.planner import AdaptivePlanner
from verifier_service.step import TapSpec, Target, TargetFacts
from verifier_service.trace.records import Header
from verifier_service.trace.tracer import Tracer
from verifier_service.trace.writer import TraceWriter

_log = logging.getLogger(__name__)

DEFAULT_NUM_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class VerifierParts:
    """What a verifier process is made of."""

    service: EngineService
    exchange: DraftExchange


def build_verifier(settings: VerifierSettings) -> VerifierParts:
    """Load everything; the service is not started yet.

    Raises ConfigError, CheckpointError or IncompatiblePair.
    """
    security = security_of(settings)
    taps = _taps(settings.drafters, security, settings.describe_s)
    by_name = {row_dtype.value: dtype for dtype, row_dtype in ROW_DTYPES.items()}
    directory = ensure_target(settings.target)
    target = load_target(
        directory,
        by_name[settings.dtype],
        taps,
        num_threads=settings.num_threads or None,
        max_context=settings.engine.max_context,
        device=resolve_device(settings.device),
    )
    facts, rows = target.facts, PagedRows(target)
    forms = {tap.key: row_form(tap, target.row_width(tap.key), facts.dtype) for tap in taps}
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, forms)
    exchange = DraftExchange(
        end,
        rows,
        ExchangeSettings(security=security),
        pair_book(target, end, directory, settings.engine.min_agreement),
    )
    planner = _planner(settings, target)
    sizes = engine_settings(settings.engine, facts.bytes_per_slot)
    tracer = tracer_of(settings.traces, facts)
    grammars = grammars_of(directory, facts)
    engine = Engine(target, exchange, planner, sizes, rows, tracer, grammars=grammars)
    for drafter in settings.drafters:
        exchange.set_replicas(drafter.name, [DrafterReplica(drafter.address)])
    return VerifierParts(EngineService(engine), exchange)


def pair_book(
    target: Target, end: TargetEnd, directory: Path, min_agreement: float
) -> PairBook | None:
    """What tests drafters beside this target; None when any drafter is to be used.

    Reads the test text with the target, so it comes before the engine.
    """
    if min_agreement <= 0:
        return None
    text = read_text(target, text_ids(directory, end.vocab_size), tuple(end.taps or ()))
    return PairBook(text, end, min_agreement)


def grammars_of(directory: Path, facts: TargetFacts) -> Grammars:
    """What compiles the grammars of requests; nothing is read before the first one comes."""
    return Grammars(lambda: read_vocabulary(directory, facts.vocab_size, facts.eos_token_ids))


def tracer_of(section: TraceSection | None, facts: TargetFacts) -> Tracer | None:
    """What records the rounds of this process; its files are begun at once."""
    if section is None:
        return None
    header = Header(
        writer=secrets.token_hex(4),
        target=facts.name,
        digest=facts.digest,
        fingerprint=facts.fingerprint,
        wall_s=time.time(),
        clock_s=time.perf_counter(),
    )
    folder = Path(section.dir).expanduser()
    writer = TraceWriter(folder, header, section.max_mb * 2**20)
    return Tracer(writer, time.perf_counter, section.share)


def security_of(settings: VerifierSettings) -> Security:
    """Towards callers and drafters alike; without files of its own, Ray's. Raises ConfigError."""
    tls, own = settings.tls, None
    if tls is not None:
        own = TlsFiles(tls.authority, tls.certificate, tls.key, tls.server_name)
    return trust(settings.token, own, os.environ, insecure=settings.insecure)


def engine_settings(section: EngineSection, bytes_per_slot: int) -> EngineSettings:
    """Sizes with the KV budget turned into slots."""
    num_slots = section.num_slots or DEFAULT_NUM_SLOTS
    if section.kv_mb is not None:
        # One page is scrap.
        num_slots = section.kv_mb * 2**20 // bytes_per_slot - section.page_size
        if num_slots < section.page_size:
            raise ConfigError(
                f"engine.kv_mb: {section.kv_mb} MiB do not hold two pages of {section.page_size} "
                f"tokens at {bytes_per_slot} bytes a token"
            )
    return EngineSettings(
        page_size=section.page_size,
        num_slots=num_slots,
        max_tokens_per_step=section.max_tokens_per_step,
        max_prefill_chunk=section.max_prefill_chunk,
        max_prefill_while_decoding=section.max_prefill_while_decoding,
        prefix_cache=section.prefix_cache,
        max_running=section.max_running,
        max_queued=section.max_queued,
        max_context=section.max_context,
        max_draft_wait_s=section.max_draft_wait_s,
    )


def _taps(drafters: list[RemoteDrafter], security: Security, describe_s: float) -> list[TapSpec]:
    """Rows to keep, one tap per checkpoint, whoever runs it."""
    found: dict[str, TapSpec] = {}
    for drafter in drafters:
        checkpoint = Path(drafter.checkpoint).expanduser() if drafter.checkpoint else None
        try:
            capabilities = describe_drafter(drafter.address, security, describe_s)
        except PeerUnavailable as error:
            _log.warning("drafter %s does not answer, no rows kept: %s", drafter.name, error)
            continue
        except OutriderError as error:
            raise ConfigError(f"drafter {drafter.name}: {error}") from error
        tap = tap_for(capabilities, checkpoint)
        if tap is not None:
            found[tap.key] = tap
    return list(found.values())


def _planner(settings: VerifierSettings, target: Target) -> Planner:
    if settings.planner == "override_only" or not settings.drafters:
        return StaticPlanner()
    return AdaptivePlanner(
        VerifyCosts(load_or_measure(target, default_cache_dir()), target.tree_parts)
    )

"""The three kinds of Serve replicas: ingress, verifier, drafter.

Each is a thin shell: it builds the thing, answers `describe`, reflects its health and drains it.
Knows no HTTP bodies, no engine internals and no wire. Torch is imported by what the replicas build,
never here.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from fastapi import FastAPI
from ray import serve
from ray.util import get_node_ip_address

from cluster.config import NGRAM, ClusterConfig, DrafterEntry
from cluster.fleet.assembly import build_drafter_server, build_verifier, resolve_target
from cluster.fleet.autoscaling import drafter_statistics
from cluster.fleet.backend import HandleBackend
from cluster.fleet.directory import Directory
from cluster.fleet.failover import Ticket
from cluster.fleet.logs import join_serve_logs
from cluster.fleet.messages import DrafterReport, SourceReport, StreamItem, VerifierReport
from cluster.fleet.statistics import statistics_of
from cluster.http.auth import load_keys
from cluster.http.ingress import Front, FrontSettings
from cluster.http.text import load_text
from protos.address import join_address
from protos.errors import InvalidRequest, OutriderError, Overloaded, PeerUnavailable
from protos.exchange import DrafterLoad
from protos.generation import GenerationRequest
from verifier_service.threads import in_passing_thread

logger = logging.getLogger(__name__)

STUCK_S: Final = 60.0
"""With work present and no step for so long, the engine counts as stuck."""
_BEATS: Final = 4
"""Signs of life that a waiting ingress gets before it would give a verifier up."""


@serve.ingress()
class IngressDeployment:
    """HTTP in, a verifier's handle out."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self,
        config: ClusterConfig,
        verifier: Any,  # noqa: ANN401
    ) -> None:
        join_serve_logs()
        http = config.http
        router = config.router
        self._backend = HandleBackend(verifier, router.period_s, router.timeout_s, router.silence_s)
        settings = FrontSettings(
            models=tuple(config.models),
            keys=load_keys(http.api_keys_env, http.api_keys_file),
            limits=http.limits(),
        )
        target_dir = await asyncio.to_thread(resolve_target, config.verifier.target)
        text = await asyncio.to_thread(load_text, target_dir)
        self._front = Front(self._backend, text, settings)
        await self._backend.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return self._front.app()

    async def __del__(self) -> None:
        if hasattr(self, "_backend"):
            await self._backend.close()


class VerifierDeployment:
    """One engine: token ids in, runs of token ids out."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, config: ClusterConfig, token: str, drafters: dict[str, Any]
    ) -> None:
        join_serve_logs()
        parts = await in_passing_thread(build_verifier, config, token)
        self._service, self._exchange, self._planner = parts.service, parts.exchange, parts.planner
        self._names = [NGRAM, *(e.name for e in config.drafters)]
        self._local = {NGRAM, *(e.name for e in config.drafters if e.colocated)}
        self._service.start()
        router = config.router
        self._beat_s = router.silence_s / _BEATS
        self._directory = Directory(drafters, self._exchange, router.period_s, router.timeout_s)
        await self._directory.start()

    async def generate(
        self, request: GenerationRequest, _ticket: Ticket | None = None
    ) -> AsyncGenerator[StreamItem, None]:
        """Runs of one request, one per step, and runs without tokens while it waits; an error is
        the last item, as a value. _ticket: was for the router that chose this replica."""
        try:
            async with aclosing(self._service.generate(request, self._beat_s)) as runs:
                async for run in runs:
                    yield run
        except OutriderError as error:
            if not isinstance(error, InvalidRequest | Overloaded):
                logger.warning("%s: %s", request.request_id, error)
            yield error

    def describe(self) -> VerifierReport:
        """What is served, and sums so far."""
        facts, stats = self._service.facts, self._service.stats()
        reports = self._directory.reports
        with_q = self._directory.sources_with_q | self._exchange.local_sources_with_q()
        with_q -= self._exchange.refused_sources()
        return VerifierReport(
            replica_id=serve.get_replica_context().replica_tag,
            pid=os.getpid(),
            max_context=self._service.max_context,
            vocab_size=facts.vocab_size,
            fingerprint=facts.fingerprint,
            invariant=facts.invariant,
            sources=tuple(
                SourceReport(name, len(reports.get(name, ())), name in self._local, name in with_q)
                for name in self._names
            ),
            statistics=statistics_of(stats, self._exchange.counts(), self._planner.counts),
            silent_s=math.inf if self._service.failure else self._service.silent_s,
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For policies of the verifier's own pool."""
        stats = self._service.stats()
        return {"num_running": float(stats.num_running), "num_waiting": float(stats.num_waiting)}

    def check_health(self) -> None:
        """Raises when the engine is dead, or has work and does not step."""
        if self._service.failure is not None:
            raise PeerUnavailable(self._service.failure)
        silent_s = self._service.silent_s
        if silent_s > STUCK_S:
            raise PeerUnavailable(f"the engine has made no step for {silent_s:.0f} s")

    async def __del__(self) -> None:
        if hasattr(self, "_directory"):
            await self._directory.close()
        if hasattr(self, "_service"):
            await asyncio.to_thread(self._service.stop)


class DrafterDeployment:
    """One drafter behind a gRPC server of its own."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, config: ClusterConfig, entry: DrafterEntry, token: str
    ) -> None:
        join_serve_logs()
        self._drain_s = entry.drain_s
        self._load_before = DrafterLoad()
        self._draining = False
        host = str(get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray's
        self._server = await asyncio.to_thread(build_drafter_server, config, entry, token, host)
        port = await self._server.start()
        self._address = join_address(host, port)

    def record_replica_metadata(self) -> dict[str, str]:
        """Serve's own record of where this replica's gRPC server listens."""
        return {"grpc": self._address}

    def describe(self) -> DrafterReport:
        """Where the drafter listens, what it can do, how loaded it is."""
        return DrafterReport(
            replica_id=serve.get_replica_context().replica_tag,
            pid=os.getpid(),
            address=self._address,
            capabilities=self._server.capabilities,
            load=self._server.load(),
            draining=self._draining,
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Sessions, share of time computing, sessions waiting, since the last call."""
        before, self._load_before = self._load_before, self._server.load()
        return drafter_statistics(before, self._load_before)

    def check_health(self) -> None:
        """Raises when the computing thread has ended."""
        self._server.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._draining = True
            await self._server.stop(self._drain_s)

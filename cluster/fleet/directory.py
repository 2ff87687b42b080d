"""Who is alive: each verifier looks at the drafter deployments and tells its draft exchange.

Every period one broadcast per deployment; what answers and is not draining is the running set.
Serve's own long poll says which replicas exist, so a replica that was removed is out of the set
at the next look, and sessions on it move. A replica that is silent stays in the set, for the
exchange leaves silent ones alone anyway; and a look that fails as a whole changes nothing: a busy
controller must not look like dead drafters.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from cluster.fleet.broadcast import Answers, ask_each
from cluster.fleet.messages import DrafterReport
from protos.exchange import DrafterReplica

logger = logging.getLogger(__name__)


class ReplicaSink(Protocol):
    """The exchange's side."""

    def set_replicas(self, source: str, replicas: Sequence[DrafterReplica]) -> None:
        """The replicas that run now."""


class Directory:
    """Watches drafter deployments by name. Used on one event loop."""

    def __init__(
        self, handles: Mapping[str, Any], sink: ReplicaSink, period_s: float, timeout_s: float
    ) -> None:
        """handles: Serve handles of the drafter deployments."""
        self._handles = handles
        self._sink = sink
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._seen: dict[str, tuple[DrafterReport, ...]] = dict.fromkeys(handles, ())
        self._task: asyncio.Task[None] | None = None

    @property
    def reports(self) -> Mapping[str, tuple[DrafterReport, ...]]:
        """The newest look, by drafter name."""
        return self._seen

    @property
    def sources_with_q(self) -> frozenset[str]:
        """Drafters of which a running replica gives q (`acceptance: rejection`)."""
        return frozenset(
            name
            for name, reports in self._seen.items()
            if any(report.capabilities.gives_q for report in reports)
        )

    async def start(self) -> None:
        """Begin looking, in the background: a verifier serves without any drafter."""
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """One look at every deployment."""
        await asyncio.gather(*(self._look_at(name) for name in self._handles))

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._period_s)

    async def _look_at(self, name: str) -> None:
        try:
            answers = await ask_each(self._handles[name], "describe", self._timeout_s)
        except DeploymentUnavailableError:
            # Serve has no replica of it right now: that is an answer.
            answers = Answers((), is_whole=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("drafter %s does not answer: %s", name, type(error).__name__)
            return
        reports = [value for value in answers.values if isinstance(value, DrafterReport)]
        if not answers.is_whole:
            answered = {report.replica_id for report in reports}
            reports += [seen for seen in self._seen[name] if seen.replica_id not in answered]
        found = tuple(report for report in reports if not report.draining)
        if {r.address for r in found} != {r.address for r in self._seen[name]}:
            logger.info("drafter %s: %d replicas", name, len(found))
        self._seen[name] = found
        replicas = [DrafterReplica(r.address, r.capabilities.incarnation, r.load) for r in found]
        self._sink.set_replicas(name, replicas)

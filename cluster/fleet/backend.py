"""The ingress's view of the verifiers: a Serve handle behind the HTTP face's port.

Knows no HTTP and no model. Invariants: a generation that is closed early cancels the request at the
verifier; a verifier's errors come out as the classes they went in; a request that lost a verifier
does not go to it again while there is another one.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from cluster.fleet.failover import Losses, Suspects, Ticket
from cluster.fleet.messages import StreamItem, VerifierReport
from cluster.fleet.progress import Progress
from cluster.fleet.router import Router
from cluster.http.port import Served
from protos.errors import InvalidRequest, OutriderError, Overloaded, PeerUnavailable
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.grammar import GRAMMAR_PARAM

logger = logging.getLogger(__name__)

SILENT_LOOKS: Final = 3
_SUSPECT_SILENCES: Final = 4
"""How long new requests keep away from a verifier that was lost and gives no sign of life, in
multiples of the silence that lost it. Serve replaces one that hangs in less."""


class VerifierLost(PeerUnavailable):
    """The verifier died, or its engine did or hangs, before the request was finished."""


class VerifierSilent(VerifierLost):
    """No tokens and no sign of life for the time a verifier is given."""


class VerifierLeaves(VerifierLost):
    """It is about to go and lets nobody in."""


class HandleBackend:
    """Generates through a verifier deployment's handle. Used on one event loop."""

    def __init__(
        self,
        verifier: Any,  # noqa: ANN401
        period_s: float,
        timeout_s: float,
        silence_s: float = 30.0,
    ) -> None:
        """period_s: between two looks, each of timeout_s. silence_s: without a run and without a
        sign of life for so long, a verifier is lost."""
        self._verifier = verifier
        self._generate = verifier.options(method_name="generate", stream=True)
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._reports: tuple[VerifierReport, ...] = ()
        self._router = Router()
        self._suspects = Suspects(_SUSPECT_SILENCES * silence_s)
        self._looking: asyncio.Task[tuple[VerifierReport, ...]] | None = None
        self._num_silent = 0
        self._heard = False
        self._num_failovers = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the first report, however long a target takes to load, then keep looking."""
        await self._look()
        while not self._reports:
            await asyncio.sleep(self._period_s)
            await self._look()
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop looking."""
        tasks = [task for task in (self._task, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def served(self) -> Served:
        """See `Backend.served`; the smallest of all verifiers where they differ."""
        reports = self._reports
        if not reports:
            raise PeerUnavailable("no verifier is running; try again")
        names = dict.fromkeys(s.name for report in reports for s in report.sources)
        return Served(
            max_context=min(report.max_context for report in reports),
            vocab_size=min(report.vocab_size for report in reports),
            fingerprint="+".join(sorted({report.fingerprint for report in reports})),
            drafters=tuple(names),
            drafters_with_q=tuple(n for n in names if all(_gives_q(r, n) for r in reports)),
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenRun, None]:
        """See `Backend.generate`. When a verifier is lost, another one goes on after the tokens
        committed so far: the text does not show it (law 6)."""
        progress = Progress(self._router.route(request))
        losses = Losses()
        while True:
            ticket = Ticket(losses.replica_ids, self._suspects.current())
            gave_tokens = False
            try:
                async with aclosing(self._attempt(progress.rest(), ticket)) as runs:
                    async for run in runs:
                        gave_tokens = True
                        yield progress.take(run)
                return
            except VerifierLost as error:
                has_failed = not isinstance(error, VerifierSilent | VerifierLeaves)
                losses.add(ticket.replica_id, has_failed=has_failed, gave_tokens=gave_tokens)
                if ticket.replica_id is not None:
                    self._suspects.add(ticket.replica_id)
                if losses.is_enough or not await self._has_another(losses):
                    raise
                self._num_failovers += 1
                where = ticket.replica_id or "a verifier"
                logger.warning("%s: lost %s, goes on at another", request.request_id, where)

    async def _attempt(
        self, request: GenerationRequest, ticket: Ticket
    ) -> AsyncGenerator[TokenRun, None]:
        """One verifier's runs. Raises: VerifierLost, InvalidRequest when the request is at fault,
        and what the verifier raised."""
        response = self._generate.remote(request, ticket)
        finished = False
        try:
            while (item := await self._next_item(response, request.request_id)) is not None:
                if isinstance(item, OutriderError):
                    finished = True
                    if isinstance(item, PeerUnavailable):
                        raise VerifierLeaves(str(item))
                    raise item
                if item.finish_reason is not FinishReason.ERROR:
                    self._suspects.clear(ticket.replica_id)
                if not item.ids and item.finish_reason is None:
                    continue
                finished = item.finish_reason is not None
                if item.finish_reason is FinishReason.ERROR and item.is_request_fault:
                    # Every other verifier would say the same.
                    param = None if request.options.grammar is None else GRAMMAR_PARAM
                    raise InvalidRequest(item.error or "the request cannot be followed", param)
                if item.finish_reason is FinishReason.ERROR:
                    raise VerifierLost(item.error or "the verifier failed")
                yield item
        except BackPressureError as error:
            raise Overloaded("all verifiers are full") from error
        except (RayError, RayServeException) as error:
            finished = True
            logger.warning("%s: verifier lost: %s", request.request_id, type(error).__name__)
            raise VerifierLost("the verifier went away; try again") from error
        finally:
            # Synchronous on purpose: a cancelled task may not await here.
            if not finished:
                response.cancel()

    async def _next_item(
        self,
        response: Any,  # noqa: ANN401
        request_id: str,
    ) -> StreamItem | None:
        """The next item, signs of life included; None at the end. Raises: VerifierSilent."""
        try:
            async with asyncio.timeout(self._silence_s):
                item: StreamItem = await anext(response)
        except StopAsyncIteration:
            return None
        except TimeoutError as error:
            logger.warning("%s: a verifier is silent", request_id)
            silent = f"a verifier gave no sign of life for {self._silence_s:g} s; try again"
            raise VerifierSilent(silent) from error
        self._heard = True
        return item

    async def _has_another(self, losses: Losses) -> bool:
        """Whether the request can go on elsewhere: a verifier is known that it has not lost.

        Only where none is known a look is taken, and a look says who answers, never who does not:
        while a verifier hangs, every look is spoilt and the reports are those from before.
        """
        if not losses.leave_another(report.replica_id for report in self._reports):
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)
        return losses.leave_another(report.replica_id for report in self._reports)

    async def statistics(self) -> Mapping[str, object]:
        """Sums over verifier replicas of what they report, and the replicas there are."""
        await self._look()
        remote: dict[str, int] = {}
        for source in (s for report in self._reports for s in report.sources if not s.local):
            remote[source.name] = max(remote.get(source.name, 0), source.num_replicas)
        return {
            "verifier": sum_nested([report.statistics for report in self._reports]),
            "verifier_replicas": len(self._reports),
            "failovers_total": self._num_failovers,
            "drafter_replicas_by_drafter": remote,
        }

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._look()

    async def _look(self) -> tuple[VerifierReport, ...]:
        """One look: who answers now. For new requests silence must last for several looks before
        it counts: a machine under load must not look like a dead one.

        A replica that hangs spoils the whole broadcast. Where there are several, a look that timed
        out says nothing of the others, so it never counts: whoever meets the one that hangs gives
        it up after `silence_s` and goes on elsewhere.
        """
        is_spoilt = False
        try:
            results = await self._verifier.broadcast("describe").results_async(
                timeout_s=self._timeout_s, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("verifiers do not answer: %s", type(error).__name__)
            results = []
            is_spoilt = isinstance(error, TimeoutError) and len(self._reports) > 1
        answers = [result for result in results if isinstance(result, VerifierReport)]
        reports = tuple(r for r in answers if r.silent_s < self._silence_s)
        for report in answers:
            alive = report.silent_s < self._silence_s
            (self._suspects.clear if alive else self._suspects.add)(report.replica_id)
        is_silent = not reports and not self._heard and not is_spoilt
        self._num_silent = self._num_silent + 1 if is_silent else 0
        self._heard = False
        if reports or self._num_silent >= SILENT_LOOKS:
            self._reports = reports
            self._router.learn(reports)
        return reports


def _gives_q(report: VerifierReport, name: str) -> bool:
    return any(source.gives_q for source in report.sources if source.name == name)


def sum_nested(values: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Numbers of nested mappings added up, key by key."""
    total: dict[str, object] = {}
    for value in values:
        for key, item in value.items():
            before = total.get(key)
            if isinstance(item, Mapping):
                inner = before if isinstance(before, Mapping) else {}
                total[key] = sum_nested([inner, item])
            elif isinstance(item, int | float):
                total[key] = (before if isinstance(before, int | float) else 0) + item
    return total

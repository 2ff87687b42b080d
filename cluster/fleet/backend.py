"""The ingress's view of the verifiers: a Serve handle behind the HTTP face's port.

Knows no HTTP and no model. Invariants: a generation that is closed early cancels the request at the
verifier; a verifier's errors come out as the classes they went in; a request that lost a verifier
does not go to it again while there is another one; a call that nobody has taken is nobody's loss.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from cluster.fleet.failover import Losses, Ticket
from cluster.fleet.lookout import Lookout
from cluster.fleet.messages import StreamItem, VerifierReport
from cluster.fleet.progress import Progress
from cluster.fleet.router import Router
from cluster.http.port import Served
from protos.errors import InvalidRequest, OutriderError, Overloaded, PeerUnavailable
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.grammar import GRAMMAR_PARAM

logger = logging.getLogger(__name__)

_NO_VERIFIER: Final = "no verifier is running; try again"
_NO_OTHER: Final = "no other verifier is running; try again"
_SLICES: Final = 8
"""How often, in the time that a verifier may be silent, it is seen who has a call by now."""


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
        self._generate = verifier.options(method_name="generate", stream=True)
        self._silence_s = silence_s
        self._router = Router()
        self._lookout = Lookout(verifier, period_s, timeout_s, silence_s, self._router.learn)
        self._num_failovers = 0

    async def start(self) -> None:
        """Wait for the first report, however long a target takes to load, then keep looking."""
        await self._lookout.start()

    async def close(self) -> None:
        """Stop looking."""
        await self._lookout.close()

    def served(self) -> Served:
        """See `Backend.served`; the smallest of all verifiers where they differ."""
        reports = self._lookout.reports
        if not reports:
            raise PeerUnavailable(_NO_VERIFIER)
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
            ticket = Ticket(losses.replica_ids, self._lookout.suspects.current())
            gave_tokens = False
            try:
                async with aclosing(self._attempt(progress.rest(), ticket, losses)) as runs:
                    async for run in runs:
                        gave_tokens = True
                        yield progress.take(run)
                return
            except VerifierLost as error:
                has_failed = not isinstance(error, VerifierSilent | VerifierLeaves)
                losses.add(ticket.replica_id, has_failed=has_failed, gave_tokens=gave_tokens)
                if ticket.replica_id is not None:
                    self._lookout.suspects.add(ticket.replica_id)
                where = ticket.replica_id or "a verifier"
                logger.warning("%s: lost %s: %s", request.request_id, where, error)
                if losses.is_enough or not await self._has_another(losses):
                    raise
                self._num_failovers += 1
                logger.warning("%s: goes on at another verifier", request.request_id)

    async def _attempt(
        self, request: GenerationRequest, ticket: Ticket, losses: Losses
    ) -> AsyncGenerator[TokenRun, None]:
        """One verifier's runs. Raises: VerifierLost, Overloaded and PeerUnavailable where nobody
        takes the call, InvalidRequest when the request is at fault, and what the verifier
        raised."""
        response = self._generate.remote(request, ticket)
        is_taken = finished = False
        try:
            item = await self._first_item(response, ticket, losses)
            while item is not None:
                is_taken = True
                self._lookout.hear(ticket.replica_id)
                if isinstance(item, OutriderError):
                    finished = True
                    if isinstance(item, PeerUnavailable):
                        raise VerifierLeaves(str(item))
                    raise item
                finished = item.finish_reason is not None
                if item.finish_reason is FinishReason.ERROR:
                    raise _failure(request, item)
                self._lookout.suspects.clear(ticket.replica_id)
                if item.ids or finished:
                    yield item
                item = await self._next_item(response)
        except BackPressureError as error:
            finished = True
            raise Overloaded("all verifiers are full", error.retry_after_s or 1.0) from error
        except (RayError, RayServeException) as error:
            finished = True
            name = type(error).__name__
            if not is_taken and ticket.replica_id is None:
                logger.warning("%s: no verifier took it: %s", request.request_id, name)
                raise PeerUnavailable(_NO_VERIFIER) from error
            logger.warning("%s: verifier lost: %s", request.request_id, name)
            raise VerifierLost("the verifier went away; try again") from error
        finally:
            # Synchronous on purpose: a cancelled task may not await here.
            if not finished:
                with suppress(RayError, RayServeException):
                    # Serve's cancel raises what the call has come to meanwhile.
                    response.cancel()

    async def _first_item(
        self,
        response: Any,  # noqa: ANN401
        ticket: Ticket,
        losses: Losses,
    ) -> StreamItem | None:
        """As `_next_item`, and the wait for a verifier that has room before it, which may be long:
        silence counts from when a verifier has got the call.

        While none has, nobody is to blame: the request stands in Serve's queue until it is taken or
        closed, or until, a silence later, no verifier is known that it might go to.
        Raises: VerifierSilent; PeerUnavailable when nobody is left.
        """
        # In a task of its own: what ends a slice of the wait must not end the call.
        coming: asyncio.Future[StreamItem] = asyncio.ensure_future(anext(response))
        coming.add_done_callback(_see)
        holder, num_slices = ticket.replica_id, 0
        try:
            while not coming.done():
                await asyncio.wait({coming}, timeout=self._silence_s / _SLICES)
                before, holder = holder, ticket.replica_id
                num_slices = num_slices + 1 if holder == before else 0
                if holder is None:
                    # Who looked dead when the call was made may be all there is by now.
                    ticket.suspects = self._lookout.suspects.current()
                if num_slices < _SLICES or coming.done():
                    continue
                if holder is not None:
                    raise self._silent()
                if not losses.leave_another(self._lookout.replica_ids):
                    raise PeerUnavailable(_NO_OTHER if losses.replica_ids else _NO_VERIFIER)
            return await coming
        except StopAsyncIteration:
            return None
        finally:
            coming.cancel()

    async def _next_item(
        self,
        response: Any,  # noqa: ANN401
    ) -> StreamItem | None:
        """The next item, signs of life included; None at the end. Raises: VerifierSilent."""
        try:
            async with asyncio.timeout(self._silence_s):
                item: StreamItem = await anext(response)
        except StopAsyncIteration:
            return None
        except TimeoutError as error:
            raise self._silent() from error
        return item

    def _silent(self) -> VerifierSilent:
        return VerifierSilent(
            f"a verifier gave no sign of life for {self._silence_s:g} s; try again"
        )

    async def _has_another(self, losses: Losses) -> bool:
        """Whether the request can go on elsewhere: a verifier is known that it has not lost. Only
        where none is known a look is taken."""
        if not losses.leave_another(self._lookout.replica_ids):
            await self._lookout.look()
        return losses.leave_another(self._lookout.replica_ids)

    async def statistics(self) -> Mapping[str, object]:
        """Sums over verifier replicas of what they report, and the replicas there are."""
        await self._lookout.look()
        reports = self._lookout.reports
        remote: dict[str, int] = {}
        for source in (s for report in reports for s in report.sources if not s.local):
            remote[source.name] = max(remote.get(source.name, 0), source.num_replicas)
        return {
            "verifier": sum_nested([report.statistics for report in reports]),
            "verifier_replicas": len(reports),
            "failovers_total": self._num_failovers,
            "drafter_replicas_by_drafter": remote,
        }


def _failure(request: GenerationRequest, run: TokenRun) -> OutriderError:
    """What a run that ended in an error means for its request."""
    if run.is_request_fault:
        # Every other verifier would say the same.
        param = None if request.options.grammar is None else GRAMMAR_PARAM
        return InvalidRequest(run.error or "the request cannot be followed", param)
    return VerifierLost(run.error or "the verifier failed")


def _see(coming: "asyncio.Future[Any]") -> None:
    """Look at what came of it, where nobody waits any more: asyncio would report it otherwise."""
    if not coming.cancelled():
        coming.exception()


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

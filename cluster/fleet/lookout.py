"""Who is alive, as one ingress sees it: verifiers are looked at in turns, each on its own.

Knows Serve handles and reports, no requests. Invariants: a verifier that hangs says nothing of the
others; silence must last for several looks before it counts, because a machine under load must not
look like a dead one; tokens heard meanwhile are as good as an answer.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.fleet.broadcast import Answers, ask_each
from cluster.fleet.failover import Suspects
from cluster.fleet.messages import VerifierReport

logger = logging.getLogger(__name__)

SILENT_LOOKS: Final = 3
"""Looks in a row that a verifier must leave unanswered to count as silent."""
_SUSPECT_SILENCES: Final = 4
"""How long new requests keep away from a verifier that was lost and gives no sign of life, in
multiples of the silence that lost it. Serve replaces one that hangs in less."""


class Lookout:
    """Looks at the verifiers of a deployment. Used on one event loop.

    reports: of those that serve, the newest of each. suspects: those that look dead.
    """

    def __init__(
        self,
        verifier: Any,  # noqa: ANN401
        period_s: float,
        timeout_s: float,
        silence_s: float,
        learn: Callable[[Sequence[VerifierReport]], None],
    ) -> None:
        """verifier: Serve's handle. period_s: between two looks, in which each verifier has
        timeout_s to answer. silence_s: one that made no step for so long does not serve. learn:
        told all reports after every look that brought one."""
        self._verifier = verifier
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._learn = learn
        self.reports: tuple[VerifierReport, ...] = ()
        self.suspects = Suspects(_SUSPECT_SILENCES * silence_s)
        self._num_missed: dict[str, int] = {}
        self._heard: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def replica_ids(self) -> frozenset[str]:
        """Those that serve."""
        return frozenset(report.replica_id for report in self.reports)

    async def start(self) -> None:
        """Wait for the first report, however long a target takes to load, then keep looking."""
        await self.look()
        while not self.reports:
            await asyncio.sleep(self._period_s)
            await self.look()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop looking."""
        tasks = [task for task in (self._watching, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def hear(self, replica_id: str | None) -> None:
        """This verifier gave something under a request just now."""
        if replica_id is not None:
            self._heard.add(replica_id)

    async def look(self) -> None:
        """See who answers. Whoever asks for a look while one is under way shares it: looks that
        overlap would count one silence several times."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self.look()

    async def _look(self) -> None:
        try:
            answers = await ask_each(self._verifier, "describe", self._timeout_s)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("verifiers do not answer: %s", type(error).__name__)
            answers = Answers((), is_whole=False)
        self._take(
            [value for value in answers.values if isinstance(value, VerifierReport)],
            answers.is_whole,
        )

    def _take(self, answers: Sequence[VerifierReport], is_whole: bool) -> None:
        """Join answers with what was known of those that did not answer."""
        alive = {r.replica_id: r for r in answers if r.silent_s < self._silence_s}
        stuck = {r.replica_id for r in answers} - alive.keys()
        for name in alive:
            self.suspects.clear(name)
        for name in stuck:
            self.suspects.add(name)
        kept: list[VerifierReport] = []
        num_missed: dict[str, int] = {}
        for report in self.reports:
            name = report.replica_id
            # What one says of itself, and that Serve no longer names one, counts at once; but not
            # where nobody would be left.
            if name in alive or (alive and (is_whole or name in stuck)):
                continue
            missed = 0 if name in self._heard else self._num_missed.get(name, 0) + 1
            if missed < SILENT_LOOKS:
                num_missed[name] = missed
                kept.append(report)
            else:
                self.suspects.add(name)
                logger.warning("%s left %d looks unanswered", name, missed)
        self._num_missed = num_missed
        self._heard.clear()
        self.reports = (*alive.values(), *kept)
        if alive:
            self._learn(self.reports)

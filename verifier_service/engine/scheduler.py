"""Which requests take part in a step, with how many rows, and who waits.

Knows lengths and pages, nothing of tokens or drafts. One budget of rows a step: rows of decoding
requests first, then prompt chunks in order of arrival, and draft nodes into what is left
(`room_for_nodes`). Invariants: a running request always gets its one row; when pages run out the
youngest goes back to the queue (law 6's entrance), never because of somebody's draft nodes; the
oldest always moves on.
"""

import bisect
from dataclasses import dataclass

from verifier_service.engine.page_pool import PagePool
from verifier_service.engine.request import RunningRequest
from verifier_service.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of known tokens that a request computes in this step; draft nodes not counted."""

    request: RunningRequest
    num_rows: int

    @property
    def commits(self) -> bool:
        """True when the last known token is among the rows: a new one follows."""
        return self.num_rows == self.request.extend_len


class Scheduler:
    """The queue, the running set and the pages between them."""

    def __init__(self, pool: PagePool, settings: EngineSettings) -> None:
        self._pool = pool
        self._settings = settings
        self.waiting: list[RunningRequest] = []
        self.running: list[RunningRequest] = []
        self.preempted: list[RunningRequest] = []

    def add(self, request: RunningRequest) -> None:
        """Queue a request in order of arrival; a preempted one comes back where it stood."""
        bisect.insort(self.waiting, request, key=lambda r: r.key)

    def remove(self, request: RunningRequest) -> None:
        """The request left, from wherever it stood."""
        for place in (self.waiting, self.running):
            if request in place:
                place.remove(request)
        self._pool.release(request.key)

    def share_rows(self) -> list[Share]:
        """This step's rows. `preempted` afterwards lists who lost their pages for it."""
        self.preempted = []
        shares = [Share(r, 1) for r in self._decoding()]
        budget = self._settings.max_tokens_per_step - len(shares)
        for request in self.running:
            if not request.is_decoding and budget > 0:
                shares.append(self._chunk(request, budget))
                budget -= shares[-1].num_rows
        while budget > 0 and self._admit_next():
            shares.append(self._chunk(self.running[-1], budget))
            budget -= shares[-1].num_rows
        return shares

    def room_for_nodes(self, shares: list[Share]) -> int:
        """Draft nodes that the step's budget leaves."""
        return self._settings.max_tokens_per_step - sum(share.num_rows for share in shares)

    def seat_nodes(self, request: RunningRequest, num_nodes: int) -> int:
        """Slots for draft nodes behind the anchor, out of free pages only; how many got one."""
        missing = request.known_len + num_nodes - request.num_slots
        if missing > 0:
            pages = min(self._pool.pages_for(missing), self._pool.num_free)
            self._grow(request, pages)
        return min(num_nodes, request.num_slots - request.known_len)

    def _decoding(self) -> list[RunningRequest]:
        """Running requests that are down to their anchor, each with a slot for it, oldest first."""
        seated: list[RunningRequest] = []
        for request in list(self.running):
            if request not in self.running or not request.is_decoding:
                continue
            while request in self.running and not self._seat_known(request):
                if not self._take_back_surplus():
                    self._preempt(self.running[-1])
            if request in self.running:
                seated.append(request)
        return seated

    def _seat_known(self, request: RunningRequest) -> bool:
        missing = request.known_len - request.num_slots
        return missing <= 0 or self._grow(request, self._pool.pages_for(missing))

    def _take_back_surplus(self) -> bool:
        """Pages that only ever held draft nodes; True when there were some."""
        freed = 0
        for request in self.running:
            kept = self._pool.pages_for(request.known_len)
            freed += self._pool.shrink(request.key, kept)
            request.withdraw(kept * self._pool.page_size)
        return freed > 0

    def _preempt(self, request: RunningRequest) -> None:
        self.running.remove(request)
        self._pool.release(request.key)
        request.restart()
        self.preempted.append(request)
        self.add(request)

    def _admit_next(self) -> bool:
        """Move the oldest waiting request in, with pages for all its known tokens."""
        if not self.waiting or len(self.running) >= self._settings.max_running:
            return False
        request = self.waiting[0]
        needed = self._pool.pages_for(request.known_len)
        # One page to spare while others run, or the newcomer would be preempted at once.
        if needed + bool(self.running) > self._pool.num_free:
            return False
        self.waiting.pop(0)
        self._pool.claim(request.key, self._pool.pages_for(request.max_len + 1))
        self._grow(request, needed)
        # Waiting requests are all younger than running ones, so order of arrival is kept.
        self.running.append(request)
        return True

    def _grow(self, request: RunningRequest, num_pages: int) -> bool:
        added = self._pool.grow(request.key, num_pages)
        if added is None:
            return False
        request.grant(added, self._pool.page_size)
        return True

    def _chunk(self, request: RunningRequest, budget: int) -> Share:
        return Share(request, min(request.extend_len, self._settings.max_prefill_chunk, budget))

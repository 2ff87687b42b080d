"""Which requests take part in a step, with how many rows, and who waits.

Knows lengths and pages, nothing of tokens or drafts. One budget of rows a step: rows of decoding
requests first, then chunks of the prompts under way (`prefill` says whose), and draft nodes into
what is left (`room_for_nodes`). While others decode, all prompts together take no more rows than
`prefill_rows`, so a long prompt delays their next token by so much and no more; and since nodes
come last, drafts never take a row from a prompt.

Requests join in order of arrival, as long as places and pages last, whether or not there are rows
for them in this step: so a short prompt is under way, and can be preferred, while a long one is
computed. A prompt begins behind what the prefix cache holds of it. A request whose next page is
just being computed by another one waits for that page, and whoever shares nothing with it goes
first.

Invariants: a decoding request always gets its one row; when pages run out, pages that only ever
held draft nodes go first, then cached ones, then the youngest goes back to the queue (law 6's
entrance); draft nodes take free pages only, so neither a request nor a cached page ever goes for
them; the oldest request always moves on, and so does the oldest prompt.
"""

import bisect
from dataclasses import dataclass

from verifier_service.engine.page_pool import PagePool
from verifier_service.engine.prefill import share_prefill
from verifier_service.engine.prefix_cache import PrefixCache
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

    def __init__(self, pool: PagePool, cache: PrefixCache, settings: EngineSettings) -> None:
        self._pool = pool
        self._cache = cache
        self._settings = settings
        self.waiting: list[RunningRequest] = []
        self.running: list[RunningRequest] = []
        self.admitted: list[RunningRequest] = []
        self.preempted: list[RunningRequest] = []

    def add(self, request: RunningRequest) -> None:
        """Queue a request in order of arrival; a preempted one comes back where it stood."""
        bisect.insort(self.waiting, request, key=lambda r: r.key)

    def remove(self, request: RunningRequest) -> None:
        """The request left, from wherever it stood."""
        if request in self.running:
            # As before a step with its newest token: a plain engine would have had that step.
            self._keep_room_ahead()
        for place in (self.waiting, self.running):
            if request in place:
                place.remove(request)
        self._pool.release(request.key)

    def share_rows(self) -> list[Share]:
        """This step's rows. Afterwards `preempted` lists who lost their pages for it, `admitted`
        who joined: their computed_len says how much of them was cached."""
        self.preempted, self.admitted = [], []
        shares = [Share(r, 1) for r in self._decoding()]
        budget = self._settings.max_tokens_per_step - len(shares)
        if shares:
            budget = min(budget, self._settings.prefill_rows)
        while self._admit_next() is not None:
            pass
        shares += self._chunks(budget)
        self._keep_room_ahead()
        return shares

    def publish(self, request: RunningRequest) -> None:
        """What was computed of a request is committed text: let its full pages be found."""
        pages = self._pool.pages_of(request.key)
        self._cache.publish(request.page_keys, request.tokens, request.computed_len, pages)

    def distrust(self, request: RunningRequest) -> None:
        """The target broke on this request: nothing of its KV is to be found again."""
        self._cache.forget_pages(self._pool.pages_of(request.key))

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
                if not (self._take_back_surplus() or self._evict(request)):
                    self._preempt(self.running[-1])
            if request in self.running:
                seated.append(request)
        return seated

    def _seat_known(self, request: RunningRequest) -> bool:
        missing = request.known_len - request.num_slots
        return missing <= 0 or self._grow(request, self._pool.pages_for(missing))

    def _evict(self, request: RunningRequest) -> bool:
        """Cached pages for the known tokens of a request; True when there were some."""
        before = self._pool.num_free
        self._cache.make_room(self._pool.pages_for(request.known_len - request.num_slots))
        return self._pool.num_free > before

    def _keep_room_ahead(self) -> None:
        """Evict until every running request could have one page for draft nodes.

        How much that is depends on the texts alone, drafted or not, so drafts change no hit.
        """
        ahead = sum(
            len(self._pool.pages_of(r.key)) - self._pool.pages_for(r.known_len)
            for r in self.running
        )
        self._cache.make_room(len(self.running) - ahead)

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

    def _admit_next(self) -> RunningRequest | None:
        """Move the oldest waiting request in, with pages for all its known tokens."""
        if len(self.running) >= self._settings.max_running:
            return None
        under_way = self._pages_under_way()
        for request in self.waiting:
            if request.wants_prompt_logits:
                # Every row of its prompt is wanted, so nothing of it may be taken from a cache.
                return request if self._admit(request, []) else None
            cached = self._cache.find(request.page_keys, request.tokens)
            following = self._cache.key(request.page_keys, request.tokens, len(cached))
            if following not in under_way:
                return request if self._admit(request, cached) else None
        return None

    def _admit(self, request: RunningRequest, cached: list[int]) -> bool:
        pool = self._pool
        needed = pool.pages_for(request.known_len) - len(cached)
        # One page to spare while others run, or the newcomer would be preempted at once.
        spare = int(bool(self.running))
        evictable = pool.num_idle - pool.num_idle_among(cached)
        if needed + spare > pool.num_free + evictable:
            return False
        self.waiting.remove(request)
        pool.share(request.key, cached)
        request.grant(cached, pool.page_size)
        request.computed_len = request.num_slots
        request.page_keys.num_published = len(cached)
        self._cache.make_room(needed + spare)
        most = pool.pages_for(request.max_len + 1) - len(cached)
        pool.claim(request.key, most, after=cached[-1] if cached else 0)
        self._grow(request, needed)
        # Somebody who waits for another's page may be older than who runs.
        bisect.insort(self.running, request, key=lambda r: r.key)
        self.admitted.append(request)
        return True

    def _pages_under_way(self) -> set[bytes]:
        """Keys of the pages that running requests are about to publish."""
        found = set[bytes]()
        for request in self.running:
            if not request.is_decoding:
                index = request.computed_len // self._pool.page_size
                key = self._cache.key(request.page_keys, request.tokens, index)
                if key is not None:
                    found.add(key)
        return found

    def _grow(self, request: RunningRequest, num_pages: int) -> bool:
        added = self._pool.grow(request.key, num_pages)
        if added is None:
            return False
        request.grant(added, self._pool.page_size)
        return True

    def _chunks(self, budget: int) -> list[Share]:
        prompts = [request for request in self.running if not request.is_decoding]
        wanted = [request.extend_len for request in prompts]
        rows = share_prefill(wanted, budget, self._settings.max_prefill_chunk)
        return [Share(r, num) for r, num in zip(prompts, rows, strict=True) if num]

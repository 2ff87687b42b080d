"""Pages of KV slots: who holds which, handed out so that a request's slots tend to be one run.

Knows owners by number only, nothing of tokens or tensors. Page p covers slots
[p * page_size, (p + 1) * page_size); page 0 is never handed out, because slot 0 is scrap
(`step.Target.allocate`) and aligned pages are worth its other slots.

    pages   0      | 1 .. 4        | 5 .. 7   | 8 .. 9    | 10 .. 12        | 13 ...
            scrap  | shared by 7,9 | owned: 7 | owned: 9  | idle: kept, but | free
                   | (kept)        |          |           | nobody holds it |

A page has one of four states. *Free*: nobody wants it. *Owned*: one owner holds it and may write
it. *Shared*: it is kept for its content, and whoever holds it (one or more) only reads it. *Idle*:
kept for its content and held by nobody; it may be evicted, and who was let go first goes first.

    free -- grow --> owned -- keep --> shared -- last owner leaves --> idle -- evict --> free
      ^---- shrink, release ----'         ^------------ share ---------'

A claim is a wish, not a hold: an owner says how far it expects to grow and others are placed
beyond it while there is room elsewhere. Invariant: every page is in exactly one state, and its
reference count is the number of owners that list it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class PagePool:
    """Hands out pages and takes them back; used by the engine's thread alone."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """`num_pages` usable pages, the scrap page not counted."""
        self.page_size = page_size
        self.num_pages = num_pages
        self._refs: npt.NDArray[np.int64] = np.zeros(num_pages + 1, dtype=np.int64)
        self._is_kept: npt.NDArray[np.bool_] = np.zeros(num_pages + 1, dtype=np.bool_)
        self._claim: npt.NDArray[np.int64] = np.zeros(num_pages + 1, dtype=np.int64)
        self._refs[0] = 1
        self._claim[0] = -1
        self._pages: dict[int, list[int]] = {}
        self._idle: dict[int, None] = {}
        self._num_free = num_pages

    @property
    def num_slots(self) -> int:
        """Slots of the whole pool, scrap page included: what the target must allocate."""
        return (self.num_pages + 1) * self.page_size

    @property
    def num_free(self) -> int:
        """Free pages; idle ones are not."""
        return self._num_free

    @property
    def num_idle(self) -> int:
        """Pages kept for their content that nobody holds."""
        return len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def pages_of(self, owner: int) -> list[int]:
        """Pages of an owner (a number from 1), in the order of its tokens."""
        return self._pages.get(owner, [])

    def num_idle_among(self, pages: Sequence[int]) -> int:
        """How many of these pages are idle."""
        return sum(page in self._idle for page in pages)

    def claim(self, owner: int, num_pages: int, after: int = 0) -> None:
        """Wish for a run: the first free and unclaimed one this long, else the longest.

        after: the page that the run should follow when that place is open. Few requests use all
        that they may: when unclaimed runs are short, the longest free stretch is shared, its first
        claimant growing from the front and this one from the middle.
        """
        free = self._free()
        is_open = free & (self._claim == 0)
        if 0 < after < self.num_pages and is_open[after + 1]:
            closed = np.flatnonzero(~is_open[after + 1 : after + 1 + num_pages])
            end = after + 1 + (int(closed[0]) if closed.size else num_pages)
            self._claim[after + 1 : end] = owner
            return
        start, length = _run(is_open, num_pages)
        if length < num_pages:
            first, stretch = _run(free, self.num_pages)
            if stretch // 2 > length:
                start, length = first + stretch - stretch // 2, stretch // 2
        self._claim[start : start + min(length, num_pages)] = owner

    def share(self, owner: int, pages: Sequence[int]) -> None:
        """A new owner holds these kept pages too, as its first ones; it only reads them."""
        held = self._pages.setdefault(owner, [])
        assert not held, "shared pages come before owned ones"
        for page in pages:
            assert self._is_kept[page], "only kept pages are shared"
            self._idle.pop(page, None)
            self._refs[page] += 1
            held.append(page)

    def grow(self, owner: int, num_pages: int) -> list[int] | None:
        """`num_pages` more pages for an owner; None (and nothing changed) when too few are free."""
        if num_pages > self._num_free:
            return None
        held = self._pages.setdefault(owner, [])
        return [self._next(owner, held) for _ in range(num_pages)]

    def shrink(self, owner: int, num_kept: int) -> int:
        """Give back all but an owner's first `num_kept` pages; how many that were.

        Later pages are let go first, so that of a text its end is evicted before its beginning.
        """
        held = self._pages.get(owner, [])
        surplus = held[num_kept:]
        del held[num_kept:]
        for page in reversed(surplus):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._is_kept[page]:
                    self._idle[page] = None
                else:
                    self._num_free += 1
        return len(surplus)

    def release(self, owner: int) -> None:
        """Take everything of an owner back, its claim included. Unknown owners own nothing."""
        self.shrink(owner, 0)
        self._pages.pop(owner, None)
        self._claim[self._claim == owner] = 0

    def keep(self, page: int) -> None:
        """From now on this owned page is read only and outlives its owners."""
        assert page > 0, "the scrap page holds nothing worth keeping"
        assert self._refs[page] == 1, "a page is kept by the owner that wrote it"
        self._is_kept[page] = True

    def drop(self, page: int) -> None:
        """The page is kept no longer; who holds it goes on holding it, to read it only."""
        self._is_kept[page] = False
        if page in self._idle:
            del self._idle[page]
            self._num_free += 1

    def evict(self) -> int | None:
        """Free the page that has been idle longest; which it was, None when no page is idle."""
        page = next(iter(self._idle), None)
        if page is not None:
            self.drop(page)
        return page

    def check(self, owners: set[int]) -> None:
        """The pool balances and nobody but `owners` holds or claims a page. For idle moments."""
        refs = Counter(page for pages in self._pages.values() for page in pages)
        assert 0 not in refs, "the scrap page was handed out"
        assert all(len(held) == len(set(held)) for held in self._pages.values()), "held twice"
        assert all(self._refs[p] == refs[p] for p in range(1, self.num_pages + 1)), "miscounted"
        idle = {p for p in range(1, self.num_pages + 1) if self._is_kept[p] and not refs[p]}
        assert set(self._idle) == idle, "an idle page is lost"
        assert len(refs) + len(idle) + self._num_free == self.num_pages, "pages were lost"
        assert set(self._pages) <= owners, "somebody who left holds pages"
        claims = {int(owner) for owner in np.unique(self._claim[1:]) if owner != 0}
        assert claims <= owners, "somebody who left claims pages"

    def _free(self) -> npt.NDArray[np.bool_]:
        free: npt.NDArray[np.bool_] = (self._refs == 0) & ~self._is_kept
        return free

    def _next(self, owner: int, held: list[int]) -> int:
        """One free page: after the last one, in the own claim, unclaimed, claimed; then any."""
        page = held[-1] + 1 if held else 0
        free = self._free()
        if not (0 < page <= self.num_pages and free[page]):
            for wanted in (self._claim == owner, self._claim == 0, self._claim > 0):
                where = np.flatnonzero(free & wanted)
                if where.size:
                    page = int(where[0])
                    break
        self._refs[page] = 1
        held.append(page)
        self._num_free -= 1
        return page


def _run(is_open: npt.NDArray[np.bool_], wanted: int) -> tuple[int, int]:
    """Start and length of the first run of at least `wanted` open places, else of the longest."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_open.astype(np.int8), [0]))))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if starts.size == 0:
        return 0, 0
    enough = np.flatnonzero(lengths >= wanted)
    best = int(enough[0]) if enough.size else int(np.argmax(lengths))
    return int(starts[best]), int(lengths[best])

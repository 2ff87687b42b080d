"""Pages of KV slots: who owns which, handed out so that a request's slots tend to be one run.

Knows owners by number only, nothing of tokens or tensors. Page p covers slots
[p * page_size, (p + 1) * page_size); page 0 is never handed out, because slot 0 is scrap
(`step.Target.allocate`) and aligned pages are worth its other slots.

    pages   0      | 1 .. 4      | 5 .. 9                 | 10 ...
            scrap  | owner 7     | claimed by 7, free     | free

A claim is a wish, not a hold: an owner says how far it expects to grow and others are placed
beyond it while there is room elsewhere. Invariant: every page is free or owned by exactly one.
"""

import numpy as np
import numpy.typing as npt


class PagePool:
    """Hands out pages and takes them back; used by the engine's thread alone."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """`num_pages` usable pages, the scrap page not counted."""
        self.page_size = page_size
        self.num_pages = num_pages
        self._owner: npt.NDArray[np.int64] = np.zeros(num_pages + 1, dtype=np.int64)
        self._claim: npt.NDArray[np.int64] = np.zeros(num_pages + 1, dtype=np.int64)
        self._owner[0] = self._claim[0] = -1
        self._pages: dict[int, list[int]] = {}
        self._num_free = num_pages

    @property
    def num_slots(self) -> int:
        """Slots of the whole pool, scrap page included: what the target must allocate."""
        return (self.num_pages + 1) * self.page_size

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return self._num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def pages_of(self, owner: int) -> list[int]:
        """Pages of an owner (a number from 1), in the order of its tokens."""
        return self._pages.get(owner, [])

    def claim(self, owner: int, num_pages: int) -> None:
        """Wish for a run: the first free and unclaimed one this long, else the longest.

        Few requests use all that they may: when unclaimed runs are short, the longest free stretch
        is shared, its first claimant growing from the front and this one from the middle.
        """
        free = self._owner == 0
        start, length = _run(free & (self._claim == 0), num_pages)
        if length < num_pages:
            first, stretch = _run(free, self.num_pages)
            if stretch // 2 > length:
                start, length = first + stretch - stretch // 2, stretch // 2
        self._claim[start : start + min(length, num_pages)] = owner

    def grow(self, owner: int, num_pages: int) -> list[int] | None:
        """`num_pages` more pages for an owner; None (and nothing changed) when too few are free."""
        if num_pages > self._num_free:
            return None
        held = self._pages.setdefault(owner, [])
        return [self._next(owner, held) for _ in range(num_pages)]

    def shrink(self, owner: int, num_kept: int) -> int:
        """Give back all but an owner's first `num_kept` pages; how many that were."""
        held = self._pages.get(owner, [])
        surplus = held[num_kept:]
        self._owner[surplus] = 0
        del held[num_kept:]
        self._num_free += len(surplus)
        return len(surplus)

    def release(self, owner: int) -> None:
        """Take everything of an owner back, its claim included. Unknown owners own nothing."""
        self.shrink(owner, 0)
        self._pages.pop(owner, None)
        self._claim[self._claim == owner] = 0

    def check(self, owners: set[int]) -> None:
        """The pool balances and nobody but `owners` holds or claims a page. For idle moments."""
        held = [page for pages in self._pages.values() for page in pages]
        assert len(held) == len(set(held)), "a page has two owners"
        assert 0 not in held, "the scrap page was handed out"
        assert len(held) + self._num_free == self.num_pages, "pages were lost"
        assert set(self._pages) <= owners, "somebody who left holds pages"
        assert all(self._owner[p] == o for o, pages in self._pages.items() for p in pages)
        assert int((self._owner[1:] == 0).sum()) == self._num_free, "a free page has an owner"
        claims = {int(owner) for owner in np.unique(self._claim[1:]) if owner != 0}
        assert claims <= owners, "somebody who left claims pages"

    def _next(self, owner: int, held: list[int]) -> int:
        """One free page: after the last one, in the own claim, unclaimed, claimed; then any."""
        page = held[-1] + 1 if held else 0
        if not (0 < page <= self.num_pages and self._owner[page] == 0):
            free = self._owner == 0
            for wanted in (self._claim == owner, self._claim == 0, self._claim > 0):
                where = np.flatnonzero(free & wanted)
                if where.size:
                    page = int(where[0])
                    break
        self._owner[page] = owner
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

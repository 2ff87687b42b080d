"""Which pages already hold the KV of a prefix: automatic prefix caching by a chain of hashes.

Knows token ids and page numbers; who holds a page, and what happens to one that nobody holds, is
the pool's business (`page_pool` draws the states).

    tokens   [ page 0 ........ | page 1 ........ | rest, anchor ]
    keys       k0 = H(root, ids) k1 = H(k0, ids)   none: only full pages of written KV

A key stands for the target and every token up to the end of its page, so equal keys mean equal KV
and equal feature rows, bit for bit where the target is invariant. Feature rows lie beside the KV
of the same slots: a drafter session opened on a hit reads rows [0, hit) like any others.

Invariants: a page is published only when its KV is written and its tokens are committed, so
neither draft nodes nor the anchor are ever found here; what is published is never written again;
a key names at most one page. A page whose content turned out to be broken is forgotten.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from verifier_service.engine.page_pool import PagePool

_DIGEST_BYTES = 32


@dataclass(slots=True)
class PageKeys:
    """Keys of one request's full pages, as far as they were asked for; tokens only ever grow.

    num_published: pages of this request that need no publishing any more.
    """

    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0


class PrefixCache:
    """Finds and publishes pages; used by the engine's thread alone."""

    def __init__(self, pool: PagePool, identity: str, is_on: bool = True) -> None:
        """identity: whatever decides what the KV of given tokens is, the target's digest above all.
        is_on False: nothing is ever found or published."""
        self._pool = pool
        self._is_on = is_on
        self._root = hashlib.blake2b(identity.encode(), digest_size=_DIGEST_BYTES).digest()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        """Pages that can be found."""
        return len(self._page_of)

    def find(self, known: PageKeys, tokens: Sequence[int]) -> list[int]:
        """Pages that hold the longest cached prefix of `tokens`, leaving the last token to compute.

        The last known token is never taken from the cache: its logits are wanted (law 3).
        """
        found: list[int] = []
        if self._is_on:
            for key in self._extend(known, tokens, (len(tokens) - 1) // self._pool.page_size):
                page = self._page_of.get(key)
                if page is None:
                    break
                found.append(page)
        return found

    def key(self, known: PageKeys, tokens: Sequence[int], index: int) -> bytes | None:
        """Key of the full page `index` of these tokens; None when it is not full, or when off."""
        num_pages = (len(tokens) - 1) // self._pool.page_size
        if not self._is_on or index >= num_pages:
            return None
        return self._extend(known, tokens, index + 1)[index]

    def publish(
        self, known: PageKeys, tokens: Sequence[int], computed_len: int, pages: Sequence[int]
    ) -> None:
        """The KV of the first computed_len tokens is written, in these pages: let others find it.

        Where another page holds the same already, this one stays its owner's alone.
        """
        if not self._is_on:
            return
        num_full = computed_len // self._pool.page_size
        if num_full <= known.num_published:
            return
        keys = self._extend(known, tokens, num_full)
        for index in range(known.num_published, num_full):
            if keys[index] not in self._page_of:
                self._page_of[keys[index]] = pages[index]
                self._key_of[pages[index]] = keys[index]
                self._pool.keep(pages[index])
        known.num_published = num_full

    def make_room(self, num_pages: int) -> None:
        """Evict idle pages, the longest idle first, until this many are free or none is idle."""
        while self._pool.num_free < num_pages:
            page = self._pool.evict()
            if page is None:
                return
            self._forget(page)
            self.num_evicted += 1

    def forget_pages(self, pages: Sequence[int]) -> None:
        """The content of these pages is not to be trusted."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)
                self._pool.drop(page)

    def check(self) -> None:
        """Keys and pages name each other, and all of the pool's idle pages can be found."""
        assert {key: page for page, key in self._key_of.items()} == self._page_of, "torn"
        assert self._pool.num_idle <= len(self._page_of), "an idle page cannot be found"

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def _extend(self, known: PageKeys, tokens: Sequence[int], num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` full pages."""
        keys, size = known.keys, self._pool.page_size
        while len(keys) < num_pages:
            first = len(keys) * size
            ids = array("q", tokens[first : first + size]).tobytes()
            parent = keys[-1] if keys else self._root
            keys.append(hashlib.blake2b(parent + ids, digest_size=_DIGEST_BYTES).digest())
        return keys[:num_pages]

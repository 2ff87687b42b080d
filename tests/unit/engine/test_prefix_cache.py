"""Pages that hold a prefix are found by what they hold, shared unchanged, and go oldest first."""

import pytest

from verifier_service.engine.page_pool import PagePool
from verifier_service.engine.prefix_cache import PageKeys, PrefixCache

SIZE = 4
TEXT = list(range(100, 120))


def filled(num_pages: int = 8, length: int = 12) -> tuple[PagePool, PrefixCache]:
    """A pool in which owner 1 computed `length` tokens of TEXT and left."""
    pool = PagePool(num_pages, SIZE)
    cache = PrefixCache(pool, "target")
    pool.grow(1, pool.pages_for(length + 1))
    cache.publish(PageKeys(), TEXT, length, pool.pages_of(1))
    pool.release(1)
    return pool, cache


def found(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return cache.find(PageKeys(), tokens)


def test_only_full_pages_of_written_tokens_are_found():
    _, cache = filled(length=11)
    assert found(cache, TEXT) == [1, 2]


def test_the_last_token_is_always_left_to_compute():
    _, cache = filled()
    assert found(cache, TEXT[:9]) == [1, 2]
    assert found(cache, TEXT[:8]) == [1]
    assert found(cache, TEXT[:4]) == []


def test_a_page_is_found_only_behind_the_same_beginning():
    _, cache = filled()
    assert found(cache, [*TEXT[:6], 7, *TEXT[7:]]) == [1]
    assert found(cache, [7, *TEXT[1:]]) == []
    assert found(cache, TEXT[4:]) == []


def test_another_target_finds_nothing():
    pool, _ = filled()
    assert found(PrefixCache(pool, "another"), TEXT) == []


def test_a_cache_that_is_off_keeps_nothing():
    pool = PagePool(4, SIZE)
    cache = PrefixCache(pool, "target", is_on=False)
    pool.grow(1, 3)
    cache.publish(PageKeys(), TEXT, 12, pool.pages_of(1))
    pool.release(1)
    assert found(cache, TEXT) == []
    assert pool.num_free == 4


def test_shared_pages_become_idle_when_the_last_owner_leaves():
    pool, cache = filled(num_pages=8)
    assert (pool.num_free, pool.num_idle) == (5, 3)
    pool.share(2, found(cache, TEXT))
    pool.share(3, found(cache, TEXT[:9]))
    assert pool.num_idle == 0
    pool.release(2)
    assert pool.num_idle == 1
    pool.check({3})
    pool.release(3)
    assert pool.num_idle == 3
    pool.check(set())


def test_the_end_of_a_text_is_evicted_before_its_beginning():
    pool, cache = filled(num_pages=8)
    cache.make_room(6)
    assert found(cache, TEXT) == [1, 2]
    cache.make_room(8)
    assert found(cache, TEXT) == []
    assert (pool.num_free, cache.num_evicted, len(cache)) == (8, 3, 0)


def test_what_was_used_longest_ago_is_evicted_first():
    pool, cache = filled(num_pages=8)
    other = [5] * 9
    pool.grow(2, 2)
    cache.publish(PageKeys(), other, 8, pool.pages_of(2))
    pool.release(2)
    pool.share(3, found(cache, TEXT))
    pool.release(3)
    cache.make_room(pool.num_free + 2)
    assert found(cache, other) == []
    assert found(cache, TEXT) == [1, 2, 3]


def test_a_held_page_is_never_evicted():
    pool, cache = filled(num_pages=8)
    pool.share(2, found(cache, TEXT[:9]))
    cache.make_room(8)
    assert (pool.num_free, pool.num_idle) == (6, 0)
    assert found(cache, TEXT) == [1, 2]


def test_a_page_computed_twice_is_kept_once():
    pool, cache = filled(num_pages=8)
    pool.grow(2, 4)
    cache.publish(PageKeys(), TEXT, 12, pool.pages_of(2))
    pool.release(2)
    assert (pool.num_free, pool.num_idle) == (5, 3)
    cache.check()


def test_pages_that_are_not_to_be_trusted_are_free_when_their_owner_leaves():
    pool, cache = filled(num_pages=8)
    pool.share(2, found(cache, TEXT))
    cache.forget_pages(pool.pages_of(2))
    assert found(cache, TEXT) == []
    pool.release(2)
    assert pool.num_free == 8
    pool.check(set())


def test_owned_pages_grow_on_behind_shared_ones_where_there_is_room():
    pool, cache = filled(num_pages=12)
    pool.share(2, found(cache, TEXT))
    pool.claim(2, 4, after=3)
    pool.claim(3, 5)
    assert pool.grow(3, 1) == [8]
    pool.grow(2, 4)
    assert pool.pages_of(2) == [1, 2, 3, 4, 5, 6, 7]


def test_a_page_that_nobody_keeps_cannot_be_shared():
    pool, _ = filled(num_pages=8)
    with pytest.raises(AssertionError):
        pool.share(2, [5])

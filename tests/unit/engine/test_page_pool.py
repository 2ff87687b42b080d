"""Pages are owned once, come back whole, and tend to lie in one run."""

import random

import pytest

from verifier_service.engine.page_pool import PagePool


def test_the_scrap_page_is_never_handed_out():
    pool = PagePool(num_pages=3, page_size=4)
    assert pool.grow(1, 3) == [1, 2, 3]
    assert pool.num_slots == 16
    assert pool.grow(2, 1) is None
    assert pool.num_free == 0


def test_growth_beyond_the_free_pages_changes_nothing():
    pool = PagePool(4, 1)
    pool.grow(1, 2)
    assert pool.grow(2, 3) is None
    assert pool.pages_of(2) == []
    pool.check({1})


def test_claims_keep_growing_owners_in_runs_of_their_own():
    pool = PagePool(30, 4)
    for owner in (1, 2, 3):
        pool.claim(owner, 8)
    for _ in range(8):
        for owner in (1, 2, 3):
            pool.grow(owner, 1)
    for owner in (1, 2, 3):
        pages = pool.pages_of(owner)
        assert pages == list(range(pages[0], pages[0] + 8))


def test_a_claim_does_not_keep_the_last_pages_from_others():
    pool = PagePool(4, 1)
    pool.claim(1, 4)
    assert sorted(pool.grow(2, 4) or []) == [1, 2, 3, 4]


def test_a_claim_longer_than_any_run_takes_the_longest():
    pool = PagePool(10, 1)
    pool.grow(1, 3)
    pool.claim(2, 50)
    assert pool.grow(2, 7) == list(range(4, 11))


def test_shrinking_returns_the_tail_only():
    pool = PagePool(6, 1)
    pool.grow(1, 5)
    assert pool.shrink(1, 2) == 3
    assert pool.pages_of(1) == [1, 2]
    assert pool.num_free == 4
    pool.check({1})


def test_claims_for_more_than_there_is_share_what_is_free():
    pool = PagePool(64, 1)
    for owner in (1, 2, 3, 4):
        pool.claim(owner, 500)
        pool.grow(owner, 2)
    for _ in range(10):
        for owner in (1, 2, 3, 4):
            pool.grow(owner, 1)
    for owner in (1, 2, 3, 4):
        pages = pool.pages_of(owner)
        assert pages == list(range(pages[0], pages[0] + 12))


@pytest.mark.parametrize("seed", range(5))
def test_the_pool_balances_after_any_interleaving(seed: int):
    rng = random.Random(seed)
    pool = PagePool(20, 4)
    owners: set[int] = set()
    for _ in range(400):
        owner = rng.randint(1, 6)
        act = rng.random()
        if act < 0.2 and owner not in owners:
            pool.claim(owner, rng.randint(1, 10))
            owners.add(owner)
        elif act < 0.6 and owner in owners:
            pool.grow(owner, rng.randint(0, 4))
        elif act < 0.8:
            pool.shrink(owner, rng.randint(0, 5))
        else:
            pool.release(owner)
            owners.discard(owner)
        pool.check(owners)
    for owner in owners:
        pool.release(owner)
    pool.check(set())
    assert pool.num_free == 20


def test_the_check_notices_an_owner_who_left():
    pool = PagePool(4, 1)
    pool.grow(9, 1)
    with pytest.raises(AssertionError):
        pool.check(set())

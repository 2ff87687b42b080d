"""Speculation as a whole is compared with plain steps, and pauses where it costs more."""

import pytest

from tests.benchmarks.planner_world import FakeDrafter, World
from verifier_service.planning.costs import VerifyCosts, default_table
from verifier_service.planning.planner import AdaptivePlanner
from verifier_service.planning.worth import Worth

PLAIN_S = 0.03
EIGHT = frozenset(range(8))


def _run(worth: Worth, steps: int, keys: frozenset[int], tokens: float, took_s: float) -> int:
    """Steps that were allowed to speculate, each reported with this outcome."""
    allowed = 0
    for _ in range(steps):
        if worth.open_step(keys):
            allowed += 1
            worth.note(len(keys), tokens, PLAIN_S, took_s)
        else:
            worth.note_plain(0.0)
    return allowed


def test_what_gains_never_pauses():
    assert _run(Worth(), 500, EIGHT, tokens=1.3, took_s=1.2 * PLAIN_S) == 500


def test_what_loses_pauses_longer_and_longer_and_is_tried_again():
    worth = Worth()
    first = _run(worth, 400, EIGHT, tokens=1.0, took_s=1.15 * PLAIN_S)
    later = _run(worth, 400, EIGHT, tokens=1.0, took_s=1.15 * PLAIN_S)
    assert 0 < later < first < 200
    _run(worth, 200, EIGHT, tokens=1.5, took_s=1.15 * PLAIN_S)
    assert _run(worth, 100, EIGHT, tokens=1.5, took_s=1.15 * PLAIN_S) == 100


def test_a_load_that_loses_does_not_pause_another():
    worth = Worth()
    _run(worth, 100, EIGHT, tokens=1.0, took_s=1.3 * PLAIN_S)
    one = frozenset({1})
    assert _run(worth, 100, one, tokens=1.5, took_s=1.2 * PLAIN_S) == 100


def test_alone_a_new_request_is_tried_at_once():
    worth = Worth()
    _run(worth, 30, frozenset({1}), tokens=1.0, took_s=1.3 * PLAIN_S)
    assert not worth.open_step(frozenset({1}))
    assert worth.open_step(frozenset({2}))


def test_time_that_plain_steps_take_too_is_no_loss():
    worth = Worth()
    for _ in range(300):
        worth.open_step(EIGHT)
        worth.note_plain(0.01)
    assert _run(worth, 200, EIGHT, tokens=1.1, took_s=1.1 * (PLAIN_S + 0.01)) == 200


@pytest.mark.parametrize("concurrency", [4, 8])
def test_bookkeeping_that_eats_the_gain_is_avoided(concurrency: int):
    """Look-ups that are hardly ever right, in steps that take 6 ms more because of them."""
    planner = AdaptivePlanner(VerifyCosts(default_table()))
    poor = FakeDrafter("poor", lambda step: 0.02, 0.006, spread=0.0, trees=False, local=True)
    world = World(planner, [poor], concurrency=concurrency)
    world.run(200)
    late = world.run(600)
    assert late.speedup > 0.96

"""What the soak calls left over, out of what /metrics says at its end."""

import pytest

from tests.benchmarks.soak import still_held

AT_REST = {
    'vllm:num_requests_running{model_name="m"}': 0.0,
    "outrider_verifier_num_running": 0.0,
    "outrider_verifier_num_waiting": 0.0,
    "outrider_verifier_num_draft_sessions": 0.0,
    "outrider_verifier_num_pages": 64.0,
    "outrider_verifier_num_free_pages": 64.0,
    'outrider_verifier_exchange_asked_total{source="ngram"}': 90.0,
}


def test_nothing_is_held_at_rest() -> None:
    assert not any(still_held(AT_REST).values())


@pytest.mark.parametrize("name", [name for name in AT_REST if name.startswith("outrider")][:3])
def test_a_gauge_above_zero_is_held(name: str) -> None:
    assert still_held(AT_REST | {name: 2.0})[name] == 2.0


def test_a_page_that_is_not_free_is_held() -> None:
    held = still_held(AT_REST | {"outrider_verifier_num_free_pages": 61.0})
    assert held["pages not free"] == 3.0


def test_a_gauge_that_nobody_tells_is_held_too() -> None:
    told = {k: v for k, v in AT_REST.items() if k != "outrider_verifier_num_draft_sessions"}
    assert any("num_draft_sessions" in name for name, value in still_held(told).items() if value)

"""Costs of verification and of drafters, and the bank that pays for them."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from protos.exchange import Capabilities, PlanKind
from protos.features import DType
from verifier_service.engine.ports import SourceInfo
from verifier_service.planning.bank import CreditBank
from verifier_service.planning.costs import VerifyCosts, VerifyTable, default_table, monotone
from verifier_service.planning.measure import load_or_measure, measure
from verifier_service.planning.sources import ExposedWait, SourceCosts
from verifier_service.step import TargetFacts


def test_a_size_that_took_longer_than_a_larger_one_was_disturbed():
    assert monotone([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.0, 2.0, 4.0]
    assert monotone([3.0, 2.0, 1.0]) == [1.0, 1.0, 1.0]


def test_more_rows_never_cost_less_whatever_was_measured():
    costs = VerifyCosts(VerifyTable({1: 0.03, 4: 0.02, 16: 0.05}, {8: -0.1, 16: 0.01}, 100))
    for branching in (False, True):
        ladder = costs.ladder(1, 60, branching, 100)
        assert (np.diff(ladder) >= 0).all()
    assert (costs.ladder(1, 40, True, 100) >= costs.ladder(1, 40, False, 100) - 1e-12).all()


def test_context_is_part_of_the_price():
    costs = VerifyCosts(VerifyTable({1: 0.03, 8: 0.04}, {}, 100, per_position_s=1e-5))
    assert costs.seconds(1, 0, 1100, 0) == pytest.approx(costs.seconds(1, 0, 100, 0) + 0.01)


def test_measured_steps_correct_the_table_for_plain_and_drafted_apart():
    costs = VerifyCosts(default_table())
    for _ in range(100):
        costs.observe(1, 0, 200, 0, 0.060)
        costs.observe(8, 0, 200, 7, 0.105)
    assert costs.seconds(1, 0, 200, 0) == pytest.approx(0.060, rel=0.02)
    assert costs.seconds(8, 0, 200, 7) == pytest.approx(0.105, rel=0.02)


def test_one_hiccup_moves_a_price_by_less_than_a_fifth():
    costs = VerifyCosts(default_table())
    for _ in range(20):
        costs.observe(1, 0, 200, 0, 0.030)
    costs.observe(1, 0, 200, 0, 3.0)
    assert costs.seconds(1, 0, 200, 0) < 0.036


def _info(local: bool = False, p50: float = 0.0, p95: float = 0.0) -> SourceInfo:
    return SourceInfo("d", Capabilities("d", "d", 1, (PlanKind.CHAIN,)), local, p50, p95)


def test_latency_by_depth_is_learnt_as_a_line():
    costs = SourceCosts()
    rng = random.Random(0)
    for _ in range(200):
        depth = rng.randint(1, 6)
        costs.observe_reply(depth, 0.004 + 0.002 * depth)
    assert costs.latency_s(2, _info()) == pytest.approx(0.008, abs=2e-4)
    assert costs.latency_s(6, _info()) == pytest.approx(0.016, abs=2e-4)


def test_sources_abroad_overlap_and_those_at_home_add_up():
    latencies = {"a": 0.01, "b": 0.02, "c": 0.004, "d": 0.003}
    local = {"a": False, "b": False, "c": True, "d": True}
    assert ExposedWait.unscaled_s(latencies, local) == 0.02
    assert ExposedWait.unscaled_s({"c": 0.004, "d": 0.003}, local) == pytest.approx(0.007)


def test_wait_hidden_by_other_work_is_learnt():
    exposed = ExposedWait()
    for _ in range(100):
        exposed.observe(0.01, 0.002)
    assert exposed.predict_s({"a": 0.01}, {"a": False}) == pytest.approx(0.002, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_time_stays_within_the_bound_for_any_acceptance(seed: int):
    rng = random.Random(seed)
    bank = CreditBank(share=0.05, grant_steps=2.0)
    plain_s, elapsed_s, tokens = 0.03, 0.0, 0
    luck = rng.random()
    for _ in range(2000):
        wanted_s = rng.choice((0.0, 0.0005, 0.01, 0.2))
        extra_s = wanted_s if wanted_s <= bank.may_spend_s(plain_s) else 0.0
        count = 1 + (rng.random() < luck if extra_s else 0)
        bank.settle({1: count}, plain_s, plain_s + extra_s)
        elapsed_s, tokens = elapsed_s + plain_s + extra_s, tokens + count
        assert elapsed_s <= 1.05 * tokens * plain_s + 2.0 * plain_s + 1e-9


def test_a_losing_request_borrows_only_a_little_of_what_others_gained():
    bank = CreditBank(share=0.05, grant_steps=0.0, loan_steps=4.0)
    for _ in range(50):
        bank.settle({1: 3}, 0.03, 0.04)
    assert bank.request_may_spend_s(2, 0.03) == pytest.approx(0.03 * 4.05)
    for _ in range(20):
        bank.settle({2: 1}, 0.03, 0.04)
    assert bank.request_may_spend_s(2, 0.03) <= 0.05 * 0.03 + 1e-12
    assert bank.may_spend_s(0.03) > 0.1


class _CountingTarget:
    """Counts forwards; the planner's clock advances with the rows of each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_forwards = 0
        self.num_slots = 0

    @property
    def facts(self) -> TargetFacts:
        return TargetFacts("t", "abc", 50, 8, 1, 2048, (0,), DType.FP32, 8, "print", True)

    def allocate(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def forward(self, spans) -> torch.Tensor:
        (span,) = spans
        assert int(span.slots.max()) < self.num_slots
        assert span.slots.numel() == span.start + span.num_rows
        self.num_forwards += 1
        branching = span.parents is not None and span.parents != tuple(range(-1, span.num_rows - 1))
        self.now += 0.001 * span.num_rows + (0.002 if branching else 0.0) + 1e-6 * span.start
        return torch.zeros(span.num_logits, 50)


def test_measuring_recovers_what_steps_cost():
    target = _CountingTarget()
    table = measure(target, clock=lambda: target.now)
    costs = VerifyCosts(table)
    assert costs.seconds(16, 0, 256, 15) == pytest.approx(0.016 + 256e-6, rel=0.01)
    assert costs.seconds(16, 16, 256, 15) == pytest.approx(0.018 + 256e-6, rel=0.01)
    assert costs.seconds(1, 0, 1024, 0) == pytest.approx(0.001 + 1024e-6, rel=0.01)


def test_a_slow_target_is_measured_at_two_points_at_least():
    target = _CountingTarget()
    table = measure(target, budget_s=0.0, clock=lambda: target.now)
    assert sorted(table.chain) == [1, 16]


def test_measured_costs_are_read_back_by_fingerprint(tmp_path):
    target = _CountingTarget()
    first = load_or_measure(target, tmp_path, clock=lambda: target.now)
    forwards = target.num_forwards
    assert load_or_measure(target, tmp_path) == first
    assert target.num_forwards == forwards


def test_a_broken_cache_is_measured_again(tmp_path):
    target = _CountingTarget()
    load_or_measure(target, tmp_path, clock=lambda: target.now)
    (cached,) = tmp_path.glob("*.json")
    cached.write_text("{}")
    forwards = target.num_forwards
    load_or_measure(target, tmp_path, clock=lambda: target.now)
    assert target.num_forwards > forwards


def test_two_that_measure_at_once_both_keep_their_costs(tmp_path, monkeypatch, caplog):
    plain = Path.replace

    def replace(written, path):
        monkeypatch.setattr(Path, "replace", plain)
        other = _CountingTarget()
        load_or_measure(other, tmp_path, clock=lambda: other.now)
        assert other.num_forwards
        return plain(written, path)

    monkeypatch.setattr(Path, "replace", replace)
    target, reader = _CountingTarget(), _CountingTarget()
    first = load_or_measure(target, tmp_path, clock=lambda: target.now)
    assert caplog.records == []
    assert load_or_measure(reader, tmp_path) == first
    assert reader.num_forwards == 0
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_what_a_busy_machine_measured_is_not_kept(tmp_path):
    table = load_or_measure(_CountingTarget(), tmp_path, budget_s=0.0)
    assert sorted(table.chain) == [1, 16]
    assert not list(tmp_path.glob("*.json"))


def test_a_table_that_is_ten_times_too_dear_is_corrected():
    costs = VerifyCosts(VerifyTable({1: 1.3, 16: 2.3}, {}, 256))
    for _ in range(60):
        costs.observe(1, 0, 256, 0, 0.035)
        costs.observe(8, 8, 256, 7, 0.045)
    assert costs.seconds(1, 0, 256, 0) == pytest.approx(0.035, rel=0.05)
    assert costs.ladder(1, 7, True, 256)[7] == pytest.approx(0.045, rel=0.05)

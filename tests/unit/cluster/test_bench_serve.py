"""The closed loop and its ratios, without a server."""

import asyncio
from dataclasses import replace

import pytest

from cluster.tools.bench_load import Load, Served, run_load, spread
from cluster.tools.bench_serve import report
from cluster.tools.bench_server import round_split


def _load(seconds_a_token: float, wall_s: float = 1.0, ids=(1, 2, 3)) -> Load:
    arrivals = tuple((0.5 + i * seconds_a_token, 1) for i in range(len(ids)))
    return Load((Served(0, ids, arrivals),), wall_s)


def test_the_loop_never_runs_more_than_its_workers_and_answers_everything():
    running = most = 0

    async def stream(question: int):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for token in range(question % 3 + 1):
            await asyncio.sleep(0)
            yield (token, question)
        running -= 1

    load = asyncio.run(run_load(stream, 10, 3))
    assert most == 3
    assert sorted(load.texts()) == list(range(10))
    assert load.texts()[2] == (0, 2, 1, 2, 2, 2)


def test_time_per_token_leaves_the_first_arrival_out():
    served = Served(0, (1, 2, 3, 4, 5), ((0.9, 2), (1.0, 1), (1.2, 2)))
    load = Load((served,), 2.0)
    assert load.tpot_s == pytest.approx(0.3 / 3)
    assert load.summary()["ttft_ms"] == pytest.approx(900)
    assert load.summary()["p99_itl_ms"] == pytest.approx(200)
    assert load.tokens_per_s == 2.5


def test_answers_of_one_arrival_have_no_decode_rate():
    load = Load((Served(0, (1,), ((0.1, 1),)), Served(1, (1, 2), ((0.1, 1), (0.3, 1)))), 1.0)
    assert load.tpot_s == pytest.approx(0.2)


def test_ratios_are_formed_per_repeat_before_the_median():
    loads = {
        (1, "off"): [_load(0.04), _load(0.08), _load(0.06)],
        (1, "auto"): [_load(0.02), _load(0.04), _load(0.06)],
    }
    result = report(loads, [_load(0.03)], [_load(0.04)])
    assert result["auto_over_off"] == {"1": 2.0}
    assert result["auto_over_off_spread"]["1"] == {"median": 2.0, "min": 1.0, "max": 2.0}
    assert result["http_over_engine"] == pytest.approx(0.75)
    assert result["different_texts"] == 0


def test_ratios_by_category_take_the_questions_of_each_alone():
    def both(first: float, second: float) -> Load:
        parts = [_load(first).served[0], replace(_load(second).served[0], question=1)]
        return Load((*parts, Served(2, (1,), ((0.1, 1),))), 1.0)

    loads = {(1, "off"): [both(0.04, 0.06)] * 2, (1, "auto"): [both(0.02, 0.05), both(0.01, 0.06)]}
    found = report(loads, [], [], ["math", "qa", "empty"])["auto_over_off_by_category"]
    assert found == {"1": {"math": 3.0, "qa": 1.1}}


def test_a_text_that_differs_in_any_pass_is_counted():
    loads = {(1, "off"): [_load(0.04)], (1, "auto"): [_load(0.04, ids=(1, 2, 4))]}
    assert report(loads, [], [])["different_texts"] == 1
    assert report(loads, [], [])["http_over_engine"] is None


def test_spread_is_median_and_extremes():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_the_round_split_adds_up_to_the_step():
    prefix = "outrider_verifier"
    before = {f"{prefix}_num_steps_total": 10.0, f"{prefix}_step_s_total": 1.0}
    after = {
        f"{prefix}_num_steps_total": 110.0,
        f"{prefix}_step_s_total": 5.0,
        f"{prefix}_draft_wait_s_total": 0.5,
        f"{prefix}_verify_s_total": 3.0,
        f'{prefix}_exchange_timed_total{{source="eagle3"}}': 50.0,
        f'{prefix}_exchange_reply_s_total{{source="eagle3"}}': 0.5,
        f'{prefix}_exchange_drafter_s_total{{source="eagle3"}}': 0.45,
    }
    split = round_split(before, after)
    parts = split["wait_ms"] + split["verify_ms"] + split["other_ms"]
    assert parts == pytest.approx(split["step_ms"]) == pytest.approx(40.0)
    assert split["drafters"]["eagle3"]["wire_ms"] == pytest.approx(1.0)
    assert split["drafters"]["eagle3"]["draft_ms"] == pytest.approx(9.0)


def test_without_steps_there_is_nothing_to_split():
    assert round_split({}, {}) == {}

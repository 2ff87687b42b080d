"""Block drafters through sessions, cache and batch equal the plain definition."""

from dataclasses import replace

import pytest
import torch
from block_cases import BLOCK, CHAIN, RAW_WIDTH, SWITCHES, block_drafter, make_run, tiny_net
from drafter_cases import opening, rows_of, work

from drafter_service.dflash.drafter import MAX_MISSING
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.features import FeatureForm
from protos.params import SamplingParams


def chain_of(result):
    assert result.tree.is_chain
    return list(result.tree.tokens)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_round_on_the_cache_equals_a_full_recomputation(name):
    run = make_run(tiny_net(**SWITCHES[name]))
    for base_len in (9, 10, 14, 15, 31):
        expected = run.plain(base_len)
        result = run.draft(base_len)
        assert chain_of(result) == expected.target_ids[:5]
        confidences = torch.tensor(expected.confidences).sigmoid()[:5]
        torch.testing.assert_close(
            torch.tensor(result.confidences), confidences, atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("name", SWITCHES)
def test_fused_rows_draft_what_raw_rows_draft(name):
    net = tiny_net(**SWITCHES[name])
    raw, fused = make_run(net), make_run(net, form=FeatureForm.FUSED)
    for base_len in (9, 10, 14):
        assert fused.draft(base_len).tree == raw.draft(base_len).tree


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_drafts_what_each_session_drafts_alone(name, temperature):
    net = tiny_net(**SWITCHES[name])
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=64)
    plans = [CHAIN, Plan(PlanKind.TREE, 5, 4, 12), Plan(PlanKind.BLOCK, 3), Plan()]
    plans.append(Plan(PlanKind.BLOCK, 4, 1, 9))
    together = block_drafter(net)
    for base_len in (12, 13, 18):
        runs = [
            make_run(net, together, seed=n, session_id=n + 1, params=replace(params, seed=n))
            for n in range(len(plans))
        ]
        alone = [
            make_run(net, seed=n, params=replace(params, seed=n)).draft(base_len + n, plan)
            for n, plan in enumerate(plans)
        ]
        works = [
            run.work(base_len + n, plan)
            for n, (run, plan) in enumerate(zip(runs, plans, strict=True))
        ]
        for one, many in zip(alone, together.handle(works), strict=True):
            assert many.status is DraftStatus.OK
            assert many.tree.tokens == one.tree.tokens
            assert many.tree.parents == one.tree.parents
            assert many.tree.scores == pytest.approx(one.tree.scores, abs=0.02)
            assert many.ranked_ids == one.ranked_ids


@pytest.mark.parametrize("name", ["in place", "anchor first", "vanilla", "dflash2"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_shorter_plan_gets_the_prefix_of_the_full_block(name, depth):
    net = tiny_net(**SWITCHES[name])
    full = chain_of(make_run(net).draft(20))
    for kind in (PlanKind.CHAIN, PlanKind.BLOCK):
        short = make_run(net).draft(20, Plan(kind, depth))
        assert chain_of(short) == full[:depth]
        assert len(short.ranked_ids) == depth


def test_a_block_longer_than_the_trained_one_is_refused_with_its_length():
    run = make_run(tiny_net())
    result = run.drafter.handle([run.work(20, Plan(PlanKind.BLOCK, BLOCK))])[0]
    assert result.status is DraftStatus.REFUSED
    assert "depth must lie in [1, 5], not 6" in result.detail


@pytest.mark.parametrize("num_missing", [1, MAX_MISSING])
def test_rows_under_way_are_done_without(num_missing):
    run = make_run(tiny_net())
    expected = run.plain(20, 19 - num_missing)
    assert chain_of(run.draft(20, num_rows=19 - num_missing)) == expected.target_ids
    late = run.plain(21)
    assert chain_of(run.draft(21)) == late.target_ids


def test_too_many_rows_under_way_are_not_ready():
    run = make_run(tiny_net())
    given = run.work(20, num_rows=19 - MAX_MISSING - 1)
    assert run.drafter.handle([given])[0].status is DraftStatus.NOT_READY
    assert chain_of(run.draft(20)) == run.plain(20).target_ids


@pytest.mark.parametrize("base_len", [1, 2])
def test_the_shortest_prefixes_draft(base_len):
    run = make_run(tiny_net())
    expected = run.plain(base_len).target_ids
    assert chain_of(run.draft(base_len)) == expected


def test_a_session_cut_back_drafts_as_if_it_had_never_gone_on():
    run = make_run(tiny_net())
    run.draft(30)
    result = run.drafter.handle([work(7, [], token_start=16, plan=CHAIN)])[0]
    assert result.status is DraftStatus.OK
    assert chain_of(result) == run.plain(16).target_ids


def test_a_session_that_was_evicted_is_lost_and_comes_back():
    net = tiny_net()
    row_bytes = 2 * 2 * 2 * 8 * 4
    drafter = block_drafter(net, cache_bytes=64 * row_bytes)
    first = make_run(net, drafter, session_id=1)
    second = make_run(net, drafter, seed=1, session_id=2)
    expected = chain_of(first.draft(20))
    second.draft(20)
    lost = drafter.handle([first.work(21)])[0]
    assert (lost.status, lost.held_tokens) == (DraftStatus.LOST, 0)
    first.base_len = first.num_rows = 0
    assert chain_of(first.draft(20)) == expected


def test_rows_that_are_not_finite_end_their_own_session_alone():
    net = tiny_net()
    drafter = block_drafter(net)
    good, bad = make_run(net, drafter, session_id=1), make_run(net, drafter, seed=1, session_id=2)
    bad.features[4, 3] = float("nan")
    results = drafter.handle([bad.work(20), good.work(20)])
    assert results[0].status is DraftStatus.REFUSED
    assert "finite" in results[0].detail
    assert chain_of(results[1]) == good.plain(20).target_ids


@pytest.mark.parametrize("name", ["in place", "dflash2", "vanilla", "rnn"])
def test_weights_that_make_no_numbers_refuse_and_draft_nothing(name):
    net = tiny_net(**SWITCHES[name])
    with torch.no_grad():
        net.lm_head.weight[3] = float("nan")
    run = make_run(net)
    result = run.drafter.handle([run.work(20)])[0]
    assert result.status is DraftStatus.REFUSED
    assert result.tree.num_nodes == 0


def test_a_shifted_layer_id_a_wrong_layout_and_a_dropped_row_change_the_drafts():
    net = tiny_net()
    right = make_run(net).draft(20)
    shifted = make_run(net)
    shifted.features = shifted.features.roll(RAW_WIDTH // 3, dims=1)
    dropped = make_run(net)
    dropped.features = dropped.features[1:]
    other = tiny_net(**SWITCHES["anchor first"])
    other.load_state_dict(net.state_dict())
    trees = [right.tree, shifted.draft(20).tree, dropped.draft(20).tree]
    trees.append(make_run(other).draft(20).tree)
    assert len({(tree.tokens, tree.scores) for tree in trees}) == 4
    assert len({tree.tokens for tree in trees}) >= 3


def test_rows_of_another_width_are_refused():
    net = tiny_net()
    drafter = block_drafter(net)
    given = work(
        7, [1, 2, 3], open=opening(FeatureForm.RAW, RAW_WIDTH + 1), rows=rows_of(torch.zeros(2, 97))
    )
    assert drafter.handle([given])[0].status is DraftStatus.REFUSED


def test_bf16_equals_the_plain_definition_in_bf16_up_to_near_ties():
    net = tiny_net(dtype=torch.bfloat16)
    run = make_run(net, dtype=torch.bfloat16)
    for base_len in (9, 14, 31):
        plain = run.plain(base_len)
        drafted = chain_of(run.draft(base_len))
        for token, values in zip(drafted, plain.scores, strict=True):
            assert float(values[token]) >= float(values.max()) - 0.05

"""Many blocks in one pass: who sees what, and the same numbers as one block alone."""

import pytest
import torch
from torch import nn

from drafter_service.dflash.reference import run_block
from drafter_service.training.batches import split_share
from drafter_service.training.block_attention import (
    Share,
    attend_by_definition,
    attend_shares,
)
from drafter_service.training.blocks import (
    ANCHORS_PER_SHARE,
    context_of,
    draw_anchors,
    mask_by_definition,
    run_blocks,
)
from drafter_service.training.norms import TrainedNorm
from tests.unit.drafter.block_fakes import BLOCK, GOLDEN, PublicCase, tiny_block
from tests.unit.drafter.training_fakes import one_record_batch, tiny_batch, tiny_records

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/dflash is not here")


@needs_golden
def test_the_mask_by_definition_is_that_of_the_public_training_code(tmp_path):
    case = PublicCase("dflash_inplace", tmp_path)
    for text in (0, 1):
        anchors = case.kept(text, "anchors").tolist()
        expected = case.io["inplace.attention_mask"][text]
        rows = len(anchors) * 8
        columns = [*range(40), *range(40, 40 + rows)]
        assert torch.equal(mask_by_definition(anchors, 40, 8), expected[:rows][:, columns])


def test_shares_give_every_anchor_the_rows_before_it_and_no_other():
    batch = tiny_batch(tiny_records(6), (3, 1, 5))
    anchors = torch.tensor([0, 4, 7, batch.records[2].answer.start + 2])
    context = context_of(batch, anchors)
    for share in context.shares:
        places = range(share.blocks.start, share.blocks.stop)
        for place, seen in zip(places, share.seen.tolist(), strict=True):
            row = int(anchors[place])
            own = context.positions[share.context.start : share.context.start + seen]
            assert own.tolist() == list(range(int(batch.positions[row]) + 1))
            feature = context.features[share.context.start + seen - 1]
            assert torch.equal(feature, batch.features[row])
    assert len(context.features) == sum(s.context.stop - s.context.start for s in context.shares)


def test_fast_attention_and_its_gradients_equal_the_definition():
    torch.manual_seed(0)
    shares = (
        Share(slice(0, 9), slice(0, 3), torch.tensor([2, 5, 9])),
        Share(slice(0, 11), slice(3, 4), torch.tensor([11])),
        Share(slice(11, 17), slice(4, 6), torch.tensor([1, 6])),
    )
    given = [
        torch.randn(*shape, requires_grad=True)
        for shape in [(6 * BLOCK, 4, 8), *[(6 * BLOCK, 2, 8)] * 2, *[(17, 2, 8)] * 2]
    ]
    q, k, v, k_context, v_context = given
    direction = torch.randn(6 * BLOCK, 32)
    found = []
    for attend in (attend_shares, attend_by_definition):
        mixed = attend(q, (k, v), (k_context, v_context), shares, BLOCK)
        found.append((mixed, *torch.autograd.grad((mixed * direction).sum(), given)))
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_a_context_row_that_is_not_seen_changes_nothing_even_when_it_is_huge():
    torch.manual_seed(0)
    shares = (Share(slice(0, 9), slice(0, 2), torch.tensor([3, 9])),)
    q, k, v = (
        torch.randn(2 * BLOCK, 4, 8),
        torch.randn(2 * BLOCK, 2, 8),
        torch.randn(2 * BLOCK, 2, 8),
    )
    k_context, v_context = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    before = attend_shares(q, (k, v), (k_context, v_context), shares, BLOCK)[:BLOCK]
    k_context[5], v_context[5] = 3.0, 1e6
    after = attend_shares(q, (k, v), (k_context, v_context), shares, BLOCK)[:BLOCK]
    torch.testing.assert_close(after, before)


def test_blocks_of_a_batch_equal_each_block_recomputed_alone():
    net, records = tiny_block(), tiny_records(6)
    batch = tiny_batch(records, (1, 4, 5))
    with torch.no_grad():
        together = run_blocks(net, batch, torch.arange(batch.num_rows))
        for number in (1, 4, 5):
            rows = batch.records[(1, 4, 5).index(number)]
            features = torch.cat([batch.prompt_features[rows.prompt], batch.features[rows.answer]])
            for row in range(rows.answer.start, rows.answer.stop):
                position = int(batch.positions[row]) + 1
                alone = run_block(net, net.fuse(features[:position]), int(batch.ids[row]))
                torch.testing.assert_close(together[row], alone.states[-1], atol=1e-5, rtol=1e-5)


def test_long_records_fall_into_several_shares_with_the_same_numbers():
    assert ANCHORS_PER_SHARE < 60
    torch.manual_seed(0)
    ids = torch.randint(3, 40, (60,))
    batch = one_record_batch(torch.randn(60, 32), ids, torch.zeros(60, 1), ids)
    net = tiny_block()
    with torch.no_grad():
        assert len(context_of(batch, torch.arange(60)).shares) > 1
        together = run_blocks(net, batch, torch.arange(60))
        alone = torch.cat([run_blocks(net, batch, torch.tensor([row])) for row in range(60)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_anchors_do_not_depend_on_how_an_update_is_split():
    records = tiny_records(12)
    together = tiny_batch(records, tuple(range(12)))
    drawn = set(together.keys[draw_anchors(together, 0.4, 7)].tolist())
    apart: set[int] = set()
    for rank in range(3):
        part = tiny_batch(records, split_share(range(12), rank, 3))
        apart |= set(part.keys[draw_anchors(part, 0.4, 7)].tolist())
    assert apart == drawn
    assert 0 < len(drawn) < together.num_rows
    assert drawn != set(together.keys[draw_anchors(together, 0.4, 8)].tolist())


def test_a_trained_norm_computes_what_torch_computes_and_its_gradients():
    torch.manual_seed(0)
    x = torch.randn(5, 3, 16, requires_grad=True)
    plain, trained = nn.RMSNorm(16, 1e-5), TrainedNorm(16, 1e-5)
    with torch.no_grad():
        plain.weight.copy_(torch.rand(16))
    trained.weight = plain.weight
    direction = torch.randn(5, 3, 16)
    found = [
        (norm(x), *torch.autograd.grad((norm(x) * direction).sum(), (x, plain.weight)))
        for norm in (trained, plain)
    ]
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)

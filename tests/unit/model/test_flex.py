"""FlexAttention computes what the plain loops define, and reads every block that a row sees.

Uncompiled: torch's own definition of the kernel, in float32. It looks at the rule of visibility and
not at the lists of blocks, so those are checked beside it.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tests.unit.model.test_attention_reference import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SCORINGS,
    SLOTS,
    rows_by_span,
    spans_of,
)
from verifier_service.model.flex import FlexStepAttention
from verifier_service.model.flex_layout import BLOCK, node_order
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.kv import Pool
from verifier_service.model.layout import lay_out
from verifier_service.model.reference import attend_span, visible_slots
from verifier_service.step import Span


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch):
    """torch's switch to run the definition as it is."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_flex_equals_the_plain_loops(scoring, alone):
    options = SCORINGS[scoring]
    generator = torch.Generator().manual_seed(3)
    pool = Pool(1, SLOTS, KV_HEADS, HEAD_DIM, torch.float32, {})
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=generator))
    keys, values = pool.kv[0].transpose(1, 2)
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 4)
    spans = spans_of(seed=4)
    for step in [[span] for span in spans] if alone else [spans]:
        layout = lay_out(step, 4, torch.float32, rules=None)
        queries = torch.randn(len(layout.ids), HEADS, HEAD_DIM, generator=generator)
        out = torch.zeros_like(queries)
        attention = FlexStepAttention(layout, shape, pool, torch_flex.flex_attention)
        scale = HEAD_DIM**-0.5
        attention.bind(queries * scale, out)
        attention.attend(0, Scoring(**options))
        for span, rows in zip(step, rows_by_span(layout.slots, step), strict=True):
            expected = attend_span(span, queries[rows], keys, values, scale, **options)
            torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_blocks_of_a_span_hold_every_slot_that_its_rows_see():
    spans = spans_of(seed=9)
    by_first, first = {}, 0
    for span in spans:
        by_first[first] = span
        first += span.num_rows
    for group in lay_out(spans, 4, torch.float32, rules=None).flex_groups:
        num_real = int(group.owners.max()) + 1
        for entry in range(group.num_spans):
            listed = group.blocks[entry, 0, 0, : group.num_blocks[entry, 0, 0]].tolist()
            seen = set()
            if entry < num_real:
                span = by_first.pop(int(group.rows[entry * group.num_rows]))
                seen = {slot // BLOCK for path in visible_slots(span) for slot in path}
            assert sorted(seen) == listed
    assert not by_first


def test_two_spans_may_read_the_same_slots():
    shared = torch.arange(1, 41)
    one = Span(1, (1, 2), 40, torch.cat([shared, torch.tensor([300, 301])]))
    two = Span(2, (3, 4, 5), 40, torch.cat([shared, torch.tensor([400, 401, 402])]), (-1, 0, 0))
    pool = Pool(1, 512, KV_HEADS, HEAD_DIM, torch.float32, {})
    pool.kv.normal_(generator=torch.Generator().manual_seed(0))
    keys, values = pool.kv[0].transpose(1, 2)
    layout = lay_out([one, two], 4, torch.float32, rules=None)
    queries = torch.randn(len(layout.ids), HEADS, HEAD_DIM)
    out = torch.zeros_like(queries)
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 4)
    attention = FlexStepAttention(layout, shape, pool, torch_flex.flex_attention)
    attention.bind(queries, out)
    attention.attend(0, Scoring())
    for span, rows in ((one, [0, 1]), (two, [2, 3, 4])):
        expected = attend_span(span, queries[rows], keys, values, 1.0)
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-5)


def test_pre_order_numbers_a_node_before_its_descendants_and_them_together():
    span = Span(1, (0,) * 7, 3, torch.arange(1, 11), (-1, 0, 0, 1, 2, 1, 4))
    order = node_order(span)
    assert order.depth.tolist() == [0, 1, 1, 2, 2, 2, 3]
    paths = visible_slots(span)
    for row in range(7):
        seen = [a for a in range(7) if order.enter[a] <= order.enter[row] < order.leave[a]]
        assert [4 + a for a in seen] == sorted(paths[row][3:])

"""Tiled and fused attention compute what the plain loops of reference.py define."""

import random

import pytest
import torch

from tests.unit.model.stepping import path_to, random_parents
from verifier_service.model.attention import Tiles
from verifier_service.model.block_layout import TILE_RULES
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.kv import Pool
from verifier_service.model.layout import lay_out
from verifier_service.model.reference import attend_span, visible_slots
from verifier_service.model.sdpa import Sdpa
from verifier_service.step import Span

HEADS, KV_HEADS, HEAD_DIM, SLOTS = 6, 2, 16, 1024
SCORINGS = {
    "plain": {},
    "window": {"window": 37},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1.0, 2.0, HEADS)},
    "all": {"window": 70, "softcap": 3.0, "sinks": torch.linspace(2.0, -1.0, HEADS)},
}


def spans_of(seed: int) -> list[Span]:
    """A long chunk, a chain, single rows, trees; some contiguous, most scattered."""
    rng = random.Random(seed)
    order = torch.randperm(SLOTS - 400, generator=torch.Generator().manual_seed(seed)) + 1
    spans, used = [], 0

    def add(start, count, parents=None, run=None):
        nonlocal used
        if run is None:
            slots = order[used : used + start + count]
            used += start + count
        else:
            slots = torch.arange(run, run + start + count)
        ids = tuple(rng.randrange(50) for _ in range(count))
        spans.append(Span(len(spans), ids, start, slots, parents, 0, run))

    add(0, TILE_RULES.block_rows + 9)
    add(70, 5)
    add(61, 1)
    add(rng.randrange(64), 1)
    add(126, 14, random_parents(rng, 14, 6))
    add(rng.randrange(60), 9, random_parents(rng, 9, 8))
    add(130, 12, random_parents(rng, 12, 6), run=SLOTS - 380)
    add(100, 3, run=SLOTS - 200)
    rng.shuffle(spans)
    return spans


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
@pytest.mark.parametrize(
    ("backend", "scoring"),
    [*((Tiles(), name) for name in SCORINGS), (Sdpa(), "plain"), (Sdpa(), "window")],
    ids=lambda value: getattr(value, "name", value),
)
def test_attention_equals_the_plain_loops(backend, scoring, alone):
    options = SCORINGS[scoring]
    generator = torch.Generator().manual_seed(3)
    pool = Pool(1, SLOTS, KV_HEADS, HEAD_DIM, torch.float32, {})
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=generator))
    keys, values = pool.kv[0].transpose(1, 2)
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 4)
    spans = spans_of(seed=4)
    for step in [[span] for span in spans] if alone else [spans]:
        layout = lay_out(step, 4, torch.float32, backend.rules)
        queries = torch.randn(len(layout.ids), HEADS, HEAD_DIM, generator=generator)
        out = torch.zeros_like(queries)
        attention = backend.over(pool).attention(layout, shape)
        scale = HEAD_DIM**-0.5
        attention.bind(queries * scale, out)
        attention.attend(0, Scoring(**options))
        for span, rows in zip(step, rows_by_span(layout.slots, step), strict=True):
            expected = attend_span(span, queries[rows], keys, values, scale, **options)
            torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-5)


def rows_by_span(slots: torch.Tensor, spans: list[Span]) -> list[list[int]]:
    """Flat rows of each span, found by the slots they write (all distinct here)."""
    place = {slot: row for row, slot in enumerate(slots.tolist()) if slot}
    return [[place[slot] for slot in span.slots[span.start :].tolist()] for span in spans]


def test_a_row_sees_the_prefix_its_ancestors_and_itself():
    parents = (-1, 0, 0, 2, 1)
    span = Span(1, (9, 8, 7, 6, 5), 3, torch.tensor([4, 2, 7, 10, 11, 12, 13, 14]), parents)
    prefix = [4, 2, 7]
    expected = [[*prefix, *(10 + row for row in path_to(parents, row))] for row in range(5)]
    assert visible_slots(span) == expected

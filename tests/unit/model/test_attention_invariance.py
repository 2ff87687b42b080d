"""Attention of a row is the same bits in any company, at SmolLM2's heads and long contexts."""

import random

import pytest
import torch

from tests.unit.model.stepping import path_to, random_parents
from verifier_service.model.attention import Tiles
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.kv import Pool
from verifier_service.model.layout import lay_out
from verifier_service.model.sdpa import Sdpa
from verifier_service.model.sdpa_trial import fault_of_kernel
from verifier_service.model.step_attention import Backend
from verifier_service.step import Span

LENGTH = 1400
SLOTS = 4096
CASES = {
    "tiles": (Tiles(), Scoring()),
    "tiles with window, soft-cap and sinks": (
        Tiles(),
        Scoring(500, 4.0, torch.linspace(-1, 1, 9)),
    ),
    "sdpa": (Sdpa(), Scoring()),
    "sdpa with window": (Sdpa(), Scoring(500)),
}


class Bench:
    """One layer's pool with LENGTH positions at slots 1.., and queries for each of them."""

    def __init__(self, dtype: torch.dtype, backend: Backend, scoring: Scoring) -> None:
        generator = torch.Generator().manual_seed(0)
        self.multiple = 4 if dtype is torch.bfloat16 else 8
        self.shape = AttentionShape(9, 3, 64, self.multiple)
        self.dtype = dtype
        self.backend = backend
        self.scoring = scoring
        self.pool = Pool(1, SLOTS, 3, 64, dtype, {})
        self.pool.kv.copy_(torch.randn(self.pool.kv.shape, generator=generator))
        self.queries = torch.randn(SLOTS + 64, 9, 64, generator=generator).to(dtype) / 8

    def run(self, spans: list[Span]) -> dict[int, torch.Tensor]:
        """Output of every row, by the slot that it writes; its query is that slot's."""
        layout = lay_out(spans, self.multiple, self.dtype, self.backend.rules)
        queries = self.queries[layout.slots]
        out = torch.zeros_like(queries)
        attention = self.backend.over(self.pool).attention(layout, self.shape)
        attention.bind(queries, out)
        attention.attend(0, self.scoring)
        return dict(zip(layout.slots.tolist(), out, strict=True))


def chunk(start: int, end: int, scattered: bool = False, shift: int = 0) -> Span:
    slots = torch.arange(1 + shift, end + 1 + shift)
    return Span(1, (0,) * (end - start), start, slots, None, 0, None if scattered else 1 + shift)


@pytest.fixture(
    params=[
        (name, dtype)
        for name, (backend, _) in CASES.items()
        for dtype in (torch.bfloat16, torch.float32)
        if (backend.name, dtype) != ("sdpa", torch.float32)  # never chosen there
    ],
    ids=str,
)
def bench(request):
    name, dtype = request.param
    found = Bench(dtype, *CASES[name])
    if found.backend.name == "sdpa":
        fault = fault_of_kernel(found.shape, found.dtype)
        if fault:
            pytest.skip(f"this machine's kernel is not used: {fault}")
    return found


@pytest.mark.parametrize("end", [60, 64, 65, 700, 1023, 1024, 1025, 1088, 1290])
def test_a_row_alone_in_a_chunk_and_in_a_batch(bench, end):
    last = end  # slot of position end - 1
    alone = bench.run([chunk(end - 1, end)])[last]
    assert torch.equal(bench.run([chunk(end - 1, end, scattered=True)])[last], alone)
    assert torch.equal(bench.run([chunk(max(0, end - 130), end)])[last], alone)
    # Others of other lengths share the group: padded tiles of either side weigh nothing.
    others = [chunk(n - 1, n, shift=1500) for n in (1, 63, end // 2 + 1, end + 70)]
    assert torch.equal(bench.run([*others, chunk(end - 1, end)])[last], alone)


@pytest.mark.parametrize("scattered", [False, True], ids=["run", "scattered"])
@pytest.mark.parametrize("start", [61, 127, 1019, 1023, 1024])
def test_nodes_of_a_tree_equal_their_paths(bench, start, scattered):
    rng = random.Random(start)
    parents = random_parents(rng, 40, 12)
    slots = torch.cat([torch.arange(1, start + 1), torch.arange(2000, 2040)])
    if not scattered:
        shift = 2000 - start
        bench.pool.move(torch.arange(1, start + 1), torch.arange(shift, 2000))
        slots = torch.arange(shift, 2040)
    first_slot = None if scattered else int(slots[0])
    together = bench.run([Span(1, (0,) * 40, start, slots, parents, 0, first_slot)])
    for leaf in set(range(40)) - set(parents):
        path = path_to(parents, leaf)
        own = torch.cat([slots[:start], slots[start + torch.tensor(path)]])
        chain = bench.run([Span(1, (0,) * len(path), start, own)])
        for row in path:
            assert torch.equal(together[2000 + row], chain[2000 + row])


@pytest.mark.parametrize("end", [70, 640])
def test_chains_and_small_trees_of_many_requests_share_groups(bench, end):
    """Rows repeated to a common length and paths read apart change no bit of anybody's."""
    rng = random.Random(end)
    spans = []
    for number, count in enumerate((1, 1, 2, 3, 4, 4, 5, 9)):
        length = end + 9 * number
        parents = random_parents(rng, count, 3) if number % 2 else None
        slots = torch.cat([torch.arange(1, length + 1), torch.arange(count) + 2000 + 20 * number])
        spans.append(Span(number, (0,) * count, length, slots, parents))
    layout = lay_out(spans, bench.multiple, bench.dtype, bench.backend.rules)
    assert len(layout.groups) < len(spans)
    together = bench.run(spans)
    for span in spans:
        parents = span.parents or tuple(range(-1, span.num_rows - 1))
        for row in range(span.num_rows):
            path = torch.tensor(path_to(parents, row))
            own = torch.cat([span.slots[: span.start], span.slots[span.start + path]])
            alone = bench.run([Span(1, (0,) * len(path), span.start, own)])
            slot = int(own[-1])
            assert torch.equal(together[slot], alone[slot])
